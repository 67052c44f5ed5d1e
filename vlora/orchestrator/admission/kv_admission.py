"""Admission by KV room: a request without KV enters once its expected KV fits beside that of all entered requests.

Without this, every request competes for blocks at once: a starving request without KV preempts one that is half done,
which then starves in turn, and nearly all KV is computed again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from vlora.memory.block_manager import BlockManager
from vlora.orchestrator.fairness import FairShares, Q, scheduling_order
from vlora.orchestrator.request_state import TrackedRequest
from vlora.types import RequestStatus

_BUCKETS = 16  # buckets of answer length, as a share of max_tokens
_PRIOR = 8.0  # weight of assumed full-length answers before the first observation
_FORGET = 0.98  # decay per answer
OLDEST_EVERY = 8  # one of this many entries goes to the oldest request, regardless of priority and share


class AnswerLengths:
    """The distribution of answer lengths as shares of max_tokens, learned from finished answers."""

    def __init__(self) -> None:
        self._weights = [0.0] * _BUCKETS
        self._weights[-1] = _PRIOR
        self._means = [1.0] * _BUCKETS  # mean share of the answers that reach each bucket

    def observe(self, num_tokens: int, max_tokens: int) -> None:
        """Learn from an answer of `num_tokens` that reached its end token or `max_tokens`."""
        self._weights = [weight * _FORGET for weight in self._weights]
        self._weights[min(_BUCKETS - 1, num_tokens * _BUCKETS // max_tokens)] += 1.0
        total = weight = 0.0
        for place in reversed(range(_BUCKETS)):
            weight += self._weights[place]
            total += self._weights[place] * (place + 1) / _BUCKETS
            self._means[place] = total / weight if weight > 1e-9 else 1.0

    def expected(self, num_tokens: int, max_tokens: int) -> int:
        """Expected total length, in tokens, of an answer that has `num_tokens` so far and continues."""
        bucket = num_tokens * _BUCKETS // max_tokens
        length = round(self._means[bucket if bucket < _BUCKETS else -1] * max_tokens)
        if length <= num_tokens:
            length = num_tokens + 1
        return length if length < max_tokens else max_tokens


class KvNeed(NamedTuple):
    """The expected KV need of a request.

    Attributes:
        tokens_left: tokens expected until its end.
        blocks: blocks that only this request holds, or that it lacks for its current tokens.
    """

    tokens_left: int
    blocks: int


@dataclasses.dataclass(eq=False)
class KvAdmission:
    """Requests that wait for KV room, and the rule by which they enter.

    A request enters if the peak number of blocks that it and all entered requests are expected to hold at any time fits
    into the available blocks. All answers are assumed to grow at the same rate, so the peak is at the end of one of the
    answers; answers that end earlier have freed their blocks. The expected length is the prompt plus the mean length of
    answers that reached the current length (`AnswerLengths`); a preempted request is counted with its maximum length.
    Prefix-cache blocks that other requests hold are counted once, and as never freed. If no request has entered, the
    first one always enters.

    Compared to reserving each request's maximum length, this serves 1.25 times as many requests per second where
    answers are longer than prompts (docs/decisions/0021). If the forecast is too low, the newest request is preempted.

    Order of entry: preempted requests, oldest first; requests with a deadline on their first answer; all others. The
    last two groups are ordered by priority, fair share and arrival. One of every `OLDEST_EVERY` entries goes to the
    oldest request. Requests that would fit never overtake the first in this order, so neither a large request nor one
    of low priority waits forever: with n older requests waiting, at most `OLDEST_EVERY` * (n + 1) + preempted requests
    enter before it.

    Args:
        max_request_blocks: KV blocks that adapters can never occupy.
    """

    block_manager: BlockManager
    max_request_blocks: int
    shares: Sequence[FairShares]

    def __post_init__(self) -> None:
        self._waiting: dict[str, TrackedRequest] = {}  # in order of arrival, except preempted ones
        self._num_entered: Counter[str] = Counter()  # entered requests, by adapter
        self._num_entries = 0
        self._num_changes = 0  # added or removed requests
        self._refused_at: tuple[int, int, bool] | None = None  # state at the last refusal: changes, blocks, starving
        self._blocks_short = 0
        self.lengths = AnswerLengths()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def waiting(self) -> Iterable[TrackedRequest]:
        return self._waiting.values()

    @property
    def entered_adapters(self) -> Set[str]:
        return self._num_entered.keys()

    def add(self, tracked: TrackedRequest) -> None:
        """Queue a new or preempted request."""
        if tracked.entered:
            self._leave(tracked)
        tracked.entered = False
        self._waiting[tracked.request_id] = tracked
        self._num_changes += 1

    def remove(self, tracked: TrackedRequest) -> None:
        self._waiting.pop(tracked.request_id, None)
        if tracked.entered:
            self._leave(tracked)
        self._num_changes += 1

    def free_blocks(self, tracked: Iterable[TrackedRequest], *, adapter_starves: bool = False) -> int:
        """Blocks that no entered request is expected to need at any time.

        Negative where answers grew longer than expected, or adapters took pages.

        Args:
            adapter_starves: requests starve for an adapter that does not fit, so no further request enters into the
                adapters' part of the arena.
        """
        needs, room = self._under_way(tracked, adapter_starves)
        return room - peak_blocks(needs, self.block_manager.block_size)

    def admit(
        self, now: float, tracked: Iterable[TrackedRequest], *, adapter_starves: bool
    ) -> Sequence[TrackedRequest]:
        """Admit waiting requests to the KV room in order, as far as they fit; return the admitted ones.

        Steps alone free no room, so after a refusal the result is computed again only when a request was added or
        removed, or the arena's part for KV has changed.

        Args:
            now: seconds of the scheduler's clock.
        """
        if not self._waiting:
            return ()
        num_blocks = self.block_manager.num_free_blocks + self.block_manager.num_taken_blocks
        if (self._num_changes, num_blocks, adapter_starves) == self._refused_at:
            return ()
        needs, room = self._under_way(tracked, adapter_starves)
        block_size, blocks_for = self.block_manager.block_size, self.block_manager.blocks_for
        entered: list[TrackedRequest] = []
        whole = sum([need.blocks + blocks_for(need.tokens_left) for need in needs])
        for t in entry_order(self._waiting.values(), self.shares, lambda: self._num_entries):
            need = self._need(t)
            whole += need.blocks + blocks_for(need.tokens_left)
            needs.append(need)
            # If even the full expected lengths fit, the peak is not computed.
            if whole > room and len(needs) > 1 and (peak := peak_blocks(needs, block_size)) > room:
                self._refused_at = self._num_changes, num_blocks, adapter_starves
                self._blocks_short = peak - room
                break
            self._num_entries += 1
            del self._waiting[t.request_id]
            t.enter(now)
            if t.adapter is not None:
                self._num_entered[t.adapter] += 1
            entered.append(t)
        return entered

    @property
    def blocks_short(self) -> int:
        """Additional free blocks that one more request needed to enter at the last `admit`; 0 if none waits."""
        return self._blocks_short if self._waiting else 0

    def _leave(self, tracked: TrackedRequest) -> None:
        """Stop counting an entered request's adapter."""
        if tracked.adapter is not None:
            self._num_entered[tracked.adapter] -= 1
            if not self._num_entered[tracked.adapter]:
                del self._num_entered[tracked.adapter]

    def _under_way(self, tracked: Iterable[TrackedRequest], adapter_starves: bool) -> tuple[list[KvNeed], int]:
        needs: list[KvNeed] = []
        own = 0
        for t in tracked:
            if t.entered:
                needs.append(self._need(t))
                own += self.block_manager.num_own(t.request_id)
        blocks = self.block_manager
        free = blocks.num_free_blocks + sum([blocks.num_users(block) == 1 for block in blocks.kept])
        if adapter_starves:
            free = min(free, self.max_request_blocks - blocks.num_taken_blocks)
        return needs, free + own

    def _need(self, t: TrackedRequest) -> KvNeed:  # hot path: called for every entered request
        block_manager, device_len = self.block_manager, t.device_len
        blocks = block_manager.blocks_for(device_len)
        if t.status is RequestStatus.RUNNING:
            held = len(block_manager.table(t.request_id))
            blocks = (blocks if blocks > held else held) - (held - block_manager.num_own(t.request_id))
        elif t.chain is not None:
            blocks -= block_manager.num_shared(t.chain, t.cached_len)
        tokens_left = self._expected_len(t) - 1 - device_len  # the KV of the last token is never computed
        return KvNeed(tokens_left if tokens_left > 0 else 0, blocks)

    def _expected_len(self, t: TrackedRequest) -> int:
        if t.is_head or t.num_preemptions:
            return t.max_len
        return t.prompt_len + self.lengths.expected(t.device_len - t.prompt_len, t.max_len - t.prompt_len)


def entry_order(waiting: Collection[Q], shares: Sequence[FairShares], num_entries: Callable[[], int]) -> Iterator[Q]:
    """Requests, given in order of arrival, in order of entry. `num_entries`, read before each one, counts entries."""
    yield from sorted([t for t in waiting if t.num_preemptions], key=lambda t: t.arrival)
    new = [t for t in waiting if not t.num_preemptions]
    bounded = [t for t in new if t.answer_by is not None]
    others = [t for t in new if t.answer_by is None] if bounded else new
    ranked, oldest = iter([*scheduling_order(bounded, shares), *scheduling_order(others, shares)]), iter(new)
    taken: set[str] = set()
    while len(taken) < len(new):
        source = oldest if num_entries() % OLDEST_EVERY == OLDEST_EVERY - 1 else ranked
        t = next(t for t in source if t.request_id not in taken)
        taken.add(t.request_id)
        yield t


def peak_blocks(needs: Sequence[KvNeed], block_size: int) -> int:
    """The peak number of blocks held at one time if all answers grow at the same rate."""
    peak = held = 0
    for number, (tokens_left, blocks) in enumerate(sorted(needs, reverse=True), 1):
        held += blocks
        then = held + number * -(-tokens_left // block_size)
        if then > peak:
            peak = then
    return peak
