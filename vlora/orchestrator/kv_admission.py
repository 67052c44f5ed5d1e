"""Admission by KV room: a request that holds no KV enters once its expected KV fits beside that of all entered ones.

Without it every request competes for blocks at once: a starving request without KV preempts one that is half done,
which then starves in its turn, and nearly everything is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from vlora.memory.books import BlockTables
from vlora.orchestrator.fairness import FairShares, in_turn
from vlora.orchestrator.request_state import Tracked
from vlora.types import RequestStatus

_BUCKETS = 16  # of the share of max_tokens that an answer takes
_PRIOR = 8.0  # answers of full length assumed before the first observation
_FORGET = 0.98  # weight of the past per answer
_OLDEST_EVERY = 8  # of so many entries one goes to the oldest request, whatever its priority and share


class AnswerLengths:
    """The distribution of answer lengths, as shares of max_tokens, learned from the answers that ended."""

    def __init__(self) -> None:
        self._weights = [0.0] * _BUCKETS
        self._weights[-1] = _PRIOR
        self._means = [1.0] * _BUCKETS  # of the answers that reach each bucket

    def observe(self, num_tokens: int, max_tokens: int) -> None:
        """Learn from an answer of `num_tokens` that ended by itself or at `max_tokens`."""
        self._weights = [weight * _FORGET for weight in self._weights]
        self._weights[min(_BUCKETS - 1, num_tokens * _BUCKETS // max_tokens)] += 1.0
        total = weight = 0.0
        for place in reversed(range(_BUCKETS)):
            weight += self._weights[place]
            total += self._weights[place] * (place + 1) / _BUCKETS
            self._means[place] = total / weight if weight > 1e-9 else 1.0

    def expected(self, num_tokens: int, max_tokens: int) -> int:
        """Expected whole length, in tokens, of an answer that has `num_tokens` so far and does not end here."""
        bucket = num_tokens * _BUCKETS // max_tokens
        length = round(self._means[bucket if bucket < _BUCKETS else -1] * max_tokens)
        if length <= num_tokens:
            length = num_tokens + 1
        return length if length < max_tokens else max_tokens


class _Need(NamedTuple):
    """blocks: that only this request holds, or lacks for the tokens it has. tokens_left: expected until its end."""

    tokens_left: int
    blocks: int


class KvAdmission:
    """Requests that wait for KV room, and the rule by which they enter.

    A request enters when the most blocks that it and all entered requests are expected to hold at any one time fit
    into the room. With all answers growing at one pace, that time is the end of one of the answers: those that end
    before it have freed their blocks. Lengths are the prompt plus the mean length of answers that got as far
    (`AnswerLengths`); a request that was preempted is counted with its longest answer. Blocks that other requests hold
    in the prefix cache are counted once, and as never freed. With nothing entered the first one enters in any case.

    Against reserving each request's whole length this serves 1.25 times as many requests a second where answers are
    longer than prompts (docs/decisions.md); where the forecast fails, the newest request is preempted.

    Order of entry: preempted requests, oldest first; requests with a bound on their first answer; all others; each by
    priority, fair share and arrival. Of every `_OLDEST_EVERY` entries one goes to the oldest request. The first in
    this order is never passed by others that would fit, so neither a large request nor one of low priority waits
    forever: with n older requests waiting, at most `_OLDEST_EVERY` * (n + 1) + preempted ones enter before it.
    """

    def __init__(self, tables: BlockTables, max_request_blocks: int, shares: Sequence[FairShares]) -> None:
        """max_request_blocks: KV blocks that adapters can never take."""
        self._tables = tables
        self._max_request_blocks = max_request_blocks
        self._shares = shares
        self._waiting: dict[str, Tracked] = {}  # in order of arrival, but for preempted ones
        self._num_entries = 0
        self._num_changes = 0  # requests that came or ended
        self._refused_at: tuple[int, int, bool] | None = None  # changes, blocks for KV and whether an adapter starved
        self._blocks_short = 0
        self.lengths = AnswerLengths()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def waiting(self) -> Iterable[Tracked]:
        return self._waiting.values()

    def add(self, tracked: Tracked) -> None:
        """Wait for room: a new request, or one that was preempted."""
        tracked.entered = False
        self._waiting[tracked.request_id] = tracked
        self._num_changes += 1

    def remove(self, tracked: Tracked) -> None:
        """Forget a request that has ended, whether it waited or had entered."""
        self._waiting.pop(tracked.request_id, None)
        self._num_changes += 1

    def free_blocks(self, tracked: Iterable[Tracked], *, adapter_starves: bool = False) -> int:
        """Blocks that no entered request is expected to hold at any time. Below 0 where answers grew longer than
        expected, or adapters took pages.

        adapter_starves: requests starve for an adapter that finds no room, so nothing more enters into the part of the
        arena that adapters may use.
        """
        needs, room = self._under_way(tracked, adapter_starves)
        return room - self._peak(needs)

    def admit(self, now: float, tracked: Iterable[Tracked], *, adapter_starves: bool) -> Sequence[Tracked]:
        """Let requests enter, in order, as far as there is room; those that did. tracked: all, entered or waiting.

        Steps alone make no room, so after a refusal all this is computed again only when requests came or ended, or
        the arena's part for KV has changed.
        """
        if not self._waiting:
            return ()
        num_blocks = self._tables.num_free_blocks + self._tables.num_taken_blocks
        if (self._num_changes, num_blocks, adapter_starves) == self._refused_at:
            return ()
        needs, room = self._under_way(tracked, adapter_starves)
        entered: list[Tracked] = []
        whole = sum([need.blocks + self._growth(need.tokens_left) for need in needs])
        for t in self._in_order():
            need = self._need(t)
            whole += need.blocks + self._growth(need.tokens_left)
            needs.append(need)
            # Where even the whole lengths fit, the peak need not be found.
            if whole > room and len(needs) > 1 and (peak := self._peak(needs)) > room:
                self._refused_at = self._num_changes, num_blocks, adapter_starves
                self._blocks_short = peak - room
                break
            self._num_entries += 1
            del self._waiting[t.request_id]
            t.enter(now)
            entered.append(t)
        return entered

    @property
    def blocks_short(self) -> int:
        """How many more blocks would have had to be free for one more request to enter when `admit` was called; 0 when
        none waits."""
        return self._blocks_short if self._waiting else 0

    def _under_way(self, tracked: Iterable[Tracked], adapter_starves: bool) -> tuple[list[_Need], int]:
        """What each entered request needs, and the blocks there are for all of these."""
        needs: list[_Need] = []
        own = 0
        for t in tracked:
            if t.entered:
                needs.append(self._need(t))
                own += self._tables.num_own(t.request_id)
        free = self._tables.num_free_blocks
        if adapter_starves:
            free = min(free, self._max_request_blocks - self._tables.num_taken_blocks)
        return needs, free + own

    def _need(self, t: Tracked) -> _Need:  # for every entered request whenever one comes or ends
        tables, device_len = self._tables, t.device_len
        blocks = tables.blocks_for(device_len)
        if t.status is RequestStatus.RUNNING:
            held = len(tables.table(t.request_id))
            blocks = (blocks if blocks > held else held) - (held - tables.num_own(t.request_id))
        elif t.chain is not None:
            blocks -= tables.num_shared(t.chain, t.cached_len)
        tokens_left = self._expected_len(t) - 1 - device_len  # the KV of the last token is never computed
        return _Need(tokens_left if tokens_left > 0 else 0, blocks)

    def _peak(self, needs: Sequence[_Need]) -> int:
        """The most blocks that requests hold at one time when all answers grow at one pace."""
        block_size = self._tables.block_size
        peak = held = 0
        for number, (tokens_left, blocks) in enumerate(sorted(needs, reverse=True), 1):
            held += blocks
            then = held + number * -(-tokens_left // block_size)
            if then > peak:
                peak = then
        return peak

    def _growth(self, num_tokens: int) -> int:
        """Blocks that so many more tokens take, at most."""
        return self._tables.blocks_for(num_tokens)

    def _in_order(self) -> Iterator[Tracked]:
        """The waiting requests in order of entry; `_num_entries` is to count each one before the next is taken."""
        yield from sorted([t for t in self._waiting.values() if t.num_preemptions], key=lambda t: t.arrival)
        new = [t for t in self._waiting.values() if not t.num_preemptions]
        bounded = [t for t in new if t.answer_by is not None]
        others = [t for t in new if t.answer_by is None] if bounded else new
        ranked, oldest = iter([*in_turn(bounded, self._shares), *in_turn(others, self._shares)]), iter(new)
        taken: set[str] = set()
        while len(taken) < len(new):
            source = oldest if self._num_entries % _OLDEST_EVERY == _OLDEST_EVERY - 1 else ranked
            t = next(t for t in source if t.request_id not in taken)
            taken.add(t.request_id)
            yield t

    def _expected_len(self, t: Tracked) -> int:
        if t.is_head or t.num_preemptions:
            return t.max_len
        return t.prompt_len + self.lengths.expected(t.device_len - t.prompt_len, t.max_len - t.prompt_len)
