"""The router's queue, in the order of the orchestrator."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from vlora.orchestrator.admission.kv_admission import entry_order
from vlora.orchestrator.fairness import FairShares, adapter_of, tenant_of
from vlora.orchestrator.request_state import TrackedRequest
from vlora.routing.standing import Need


class Entry:
    """An unfinished request, with the attributes of a `TrackedRequest` that the orchestrator's order reads.

    Its tokens are counted in blocks.
    """

    __slots__ = (
        "adapter",
        "answer_by",
        "arrival",
        "cached_len",
        "device_len",
        "need",
        "num_preemptions",
        "priority",
        "removed",
        "request_id",
        "tenant",
    )

    def __init__(self, need: Need) -> None:
        self.need = need
        self.request_id = need.request_id
        self.adapter = need.adapter
        self.tenant = need.tenant
        self.priority = need.priority
        self.arrival = need.arrival
        self.answer_by = need.answer_by
        self.num_preemptions = int(need.returned)
        self.device_len, self.cached_len = need.blocks, 0
        self.removed = False

    def __lt__(self, other: Entry) -> bool:
        return self.arrival < other.arrival

    @property
    def tracked(self) -> TrackedRequest:
        """This entry as the orchestrator's functions expect it."""
        return cast(TrackedRequest, self)


_Group = tuple[bool, bool, int, str | None, str | None]


class WaitingQueue:
    """Requests that no replica has room for.

    Order: returned requests, the oldest first; requests with a deadline; all others. The last two by priority, then
    fair shares, then arrival, and one of every `OLDEST_EVERY` placements goes to the oldest: `entry_order` of the
    orchestrator. In this order requests differ by few properties, so only the oldest of each group of equal requests is
    compared. With shares between both tenants and adapters, the adapters' shares are compared among these alone.

    Args:
        weights: fair shares between adapters; not applied if empty.
        tenant_weights: fair shares between tenants, which precede those between adapters; not applied if empty.
        by_arrival: order by arrival alone.
    """

    def __init__(
        self, weights: Mapping[str, float], tenant_weights: Mapping[str, float], *, by_arrival: bool = False
    ) -> None:
        self._by_arrival = by_arrival
        self._by_adapter = bool(weights) and not by_arrival
        self._by_tenant = bool(tenant_weights) and not by_arrival
        self._shares: Sequence[FairShares] = [
            FairShares(given, name_of)
            for given, name_of in ((weights, adapter_of), (tenant_weights, tenant_of))
            if given and not by_arrival
        ]
        self._groups: dict[_Group, list[Entry]] = {}  # heaps by arrival
        self._waiting: dict[str, Entry] = {}
        self._placed: dict[str, Entry] = {}  # requests on a replica, for the fair shares
        self._num_placed = 0  # placements of requests that had not returned
        self._first: Entry | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[Need]:
        """The waiting requests, in no particular order."""
        return (entry.need for entry in self._waiting.values())

    def add(self, need: Need) -> None:
        assert need.request_id not in self._waiting and need.request_id not in self._placed, need.request_id
        entry = self._waiting[need.request_id] = Entry(need)
        for shares in self._shares:
            shares.add(entry.tracked)
        heapq.heappush(self._groups.setdefault(self._group(entry), []), entry)
        self._first = None

    @property
    def first(self) -> Need | None:
        """The next request to place; None if none waits."""
        if self._first is None and self._waiting:
            heads = sorted(filter(None, map(self._head, list(self._groups))))
            if len(heads) == 1 or self._by_arrival:
                self._first = heads[0]
            else:
                order = entry_order([head.tracked for head in heads], self._shares, lambda: self._num_placed)
                self._first = cast(Entry, next(order))
        return None if self._first is None else self._first.need

    def place_first(self) -> None:
        """The first request is sent to a replica."""
        assert self._first is not None
        self.place(self._first.request_id)

    def place(self, request_id: str) -> None:
        entry = self._waiting.pop(request_id)
        entry.removed = True
        self._first = None
        self._num_placed += not entry.num_preemptions
        self._placed[entry.request_id] = entry
        self.count_service(entry.request_id, entry.need.blocks)

    def count_service(self, request_id: str, blocks: int) -> None:
        """Count computed blocks of a request on a replica towards the fair shares."""
        if self._shares and blocks > 0:
            tracked = self._placed[request_id].tracked
            for shares in self._shares:
                shares.count_service(tracked, blocks)
            self._first = None

    def remove(self, request_id: str) -> None:
        """A request has ended, waiting or on a replica, or is taken from its replica."""
        entry = self._waiting.pop(request_id, None) or self._placed.pop(request_id)
        entry.removed = True
        for shares in self._shares:
            shares.remove(entry.tracked)
        if self._shares or entry is self._first:
            self._first = None

    def _group(self, entry: Entry) -> _Group:
        if self._by_arrival:
            return False, False, 0, None, None
        return (
            bool(entry.num_preemptions),
            entry.answer_by is not None,
            entry.priority,
            entry.tenant if self._by_tenant else None,
            adapter_of(entry.tracked) if self._by_adapter else None,
        )

    def _head(self, group: _Group) -> Entry | None:
        """The oldest request of a group. Removes entries that no longer wait, and the group with its last entry."""
        heap = self._groups[group]
        while heap and heap[0].removed:
            heapq.heappop(heap)
        if heap:
            return heap[0]
        del self._groups[group]
        return None
