"""One replica as the router knows it: the requests sent there, and its reports."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Set
from typing import NamedTuple

_MOST_UNREPORTED = 4096  # requests sent since the last report; a replica that never reports keeps no more of them


class Need(NamedTuple):
    """The requirements of a request on a replica.

    Attributes:
        request_id: unique among the unfinished requests.
        adapter: None for the base model.
        blocks: KV blocks of its prompt and of what was answered so far, and one to continue.
        arrival: its place in the order of arrival, kept when it returns from a replica.
        priority, tenant: as of a request.
        answer_by: latest time of its first answer, on the caller's clock; None without a deadline, and after the first
            answer.
        returned: it was on a replica before: moved, evicted, or its replica has ended.
        prefix: keys of its first KV blocks (`TokenChain`), in order, computed with the adapter's content hash.
        version: the content hash of the adapter with which its answer began; None before its first token.
    """

    request_id: str
    adapter: str | None
    blocks: int
    arrival: int
    priority: int = 0
    tenant: str | None = None
    answer_by: float | None = None
    returned: bool = False
    prefix: tuple[bytes, ...] = ()
    version: str | None = None

    @property
    def new_tokens(self) -> int:
        """What fair shares count it as, in blocks."""
        return self.blocks

    @property
    def num_preemptions(self) -> int:
        return int(self.returned)


class Room(NamedTuple):
    max_batch_size: int
    blocks: int
    adapters: int = 1 << 30


class Report(NamedTuple):
    """A replica's own account, as of some earlier time.

    `taken` and `ended` count from the replica's `join` and say which of the router's requests the report includes.

    Attributes:
        free_blocks: KV blocks that are left if each request it has taken holds its present tokens and one more block.
        taken: requests from this router that it has taken.
        ended: of these, requests that have ended, cancelled and moved ones included.
        num_requests: unfinished requests of all front ends; None if there is only one.
        adapters: adapters on its device or being loaded; None: as in the report before.
        num_sharing: front ends of the replica.
    """

    free_blocks: int
    taken: int
    ended: int
    num_requests: int | None = None
    adapters: Set[str] | None = None
    num_sharing: int = 1


class ReplicaLoad:
    """A replica's room, requests and adapters.

    Attributes:
        capacity: requests it takes at a time; more than a batch, so that its own scheduler has a choice.
        size: unfinished requests, of other front ends too.
        share: of several front ends, requests that this one may have there whatever the others have; otherwise one
            whose own requests always wait would keep the others out.
        holds: requests sent there that have not ended, by id, the earliest sent first.
        resident: requests that use each adapter on its device, the least recently used adapter first.
        barred: adapters that it cannot load.
        lacks: contents of adapters, each with its hash, that it does not have.
        draining: it takes no further requests.
        free_blocks: KV blocks for further requests; negative where answers grew over the room.
    """

    __slots__ = (
        "_num_ended",
        "_num_released",
        "_num_sent",
        "_others",
        "_released",
        "_sent",
        "barred",
        "capacity",
        "draining",
        "free_blocks",
        "holds",
        "lacks",
        "name",
        "num_used",
        "resident",
        "room",
        "share",
        "size",
    )

    def __init__(self, name: str, room: Room, over: float) -> None:
        self.name = name
        self.room = room
        self.capacity = math.inf if math.isinf(over) else math.ceil(over * room.max_batch_size)
        self.size = self.share = 0
        self.holds: dict[str, Need] = {}
        self.resident: dict[str, int] = {}
        self.num_used = 0  # adapters in `resident` with at least one request
        self.barred: set[str] = set()
        self.lacks: set[tuple[str, str]] = set()
        self.draining = False
        self.free_blocks = room.blocks
        self._others = 0  # requests of other front ends
        self._num_sent = self._num_released = 0
        self._num_ended = 0  # as last reported: its free blocks include them
        # Blocks of the requests that were sent, and that ended, since the last report.
        self._sent: deque[int] = deque(maxlen=_MOST_UNREPORTED)
        self._released: deque[int] = deque(maxlen=_MOST_UNREPORTED)

    @property
    def open(self) -> bool:
        """Whether it takes further requests, as far as their number is concerned."""
        return not self.draining and (self.size < self.capacity or len(self.holds) < self.share)

    def takes(self, need: Need) -> bool:
        return (
            (
                (self.size < self.capacity and need.blocks <= self.free_blocks)
                or (len(self.holds) < self.share and need.blocks <= self.room.blocks)
            )
            and not self.draining
            and need.adapter not in self.barred
            and (need.version is None or self.has_content(need))
        )

    def could_take(self, need: Need) -> bool:
        """Whether there would be room for a request if it held no others."""
        return need.blocks <= self.room.blocks and self.serves(need)

    def serves(self, need: Need) -> bool:
        """Whether it can load a request's adapter, with the content with which the answer began."""
        return need.adapter not in self.barred and self.has_content(need)

    def has_content(self, need: Need) -> bool:
        """Whether it may have the content with which a request's answer began."""
        return need.adapter is None or need.version is None or (need.adapter, need.version) not in self.lacks

    def has(self, adapter: str | None) -> bool:
        """Whether an adapter is on the device or being loaded. The base model is on every device."""
        return adapter is None or adapter in self.resident

    def place_for(self, adapter: str | None) -> int:
        """0: the adapter is there, or a place is free; 1: it would displace an unused one; 2: all are in use."""
        if self.has(adapter) or len(self.resident) < self.room.adapters:
            return 0
        return 1 if self.num_used < self.room.adapters else 2

    def send(self, need: Need) -> str | None:
        """Count a request that is sent there. Returns the adapter that its own displaces, if any."""
        self.holds[need.request_id] = need
        self.size += 1
        self.free_blocks -= need.blocks
        self._num_sent += 1
        self._sent.append(need.blocks)
        if need.adapter is None:
            return None
        users = self.resident.pop(need.adapter, None)
        displaced = None
        if users is None and len(self.resident) >= self.room.adapters:
            displaced = next((name for name, count in self.resident.items() if not count), None)
            if displaced is not None:
                del self.resident[displaced]
        self.num_used += not users
        self.resident[need.adapter] = (users or 0) + 1
        return displaced

    def release(self, request_id: str) -> Need:
        """Stop counting a request that has ended there, or is taken from there."""
        need = self.holds.pop(request_id)
        self.size -= 1
        self._num_released += 1
        if self._num_released > self._num_ended:
            self.free_blocks += need.blocks
            self._released.append(need.blocks)
        if need.adapter is not None:
            self.resident[need.adapter] -= 1
            self.num_used -= not self.resident[need.adapter]
        return need

    def grow(self, request_id: str, blocks: int) -> int:
        """Count the blocks of a request after its answer has grown. Returns the difference."""
        need = self.holds[request_id]
        self.holds[request_id] = need._replace(blocks=blocks)
        self.free_blocks -= blocks - need.blocks
        return blocks - need.blocks

    def apply(self, report: Report) -> None:
        """Replace the estimates by a report, corrected by what was sent and what has ended since it was made."""
        _keep_last(self._sent, self._num_sent - report.taken)
        _keep_last(self._released, self._num_released - report.ended)
        self._num_ended = report.ended
        self.free_blocks = report.free_blocks - sum(self._sent) + sum(self._released)
        if report.num_requests is not None:
            self._others = max(0, report.num_requests - (report.taken - report.ended))
            self.size = len(self.holds) + self._others
        self.share = self.room.max_batch_size // report.num_sharing if report.num_sharing > 1 else 0
        if report.adapters is not None:
            # An adapter of a request that the report does not include yet will be there.
            kept = {name: count for name, count in self.resident.items() if count or name in report.adapters}
            self.resident = {**dict.fromkeys(report.adapters - kept.keys(), 0), **kept}


def _keep_last(log: deque[int], number: int) -> None:
    while len(log) > max(0, number):
        log.popleft()
