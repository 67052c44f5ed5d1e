"""Cuts a decision to the token budget, then to the KV blocks, preempting other requests if necessary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from vlora.memory.books import BlockTables
from vlora.memory.prefix_cache import Key
from vlora.orchestrator.request_state import Tracked
from vlora.types import BatchItem, RequestStatus


class Grants(NamedTuple):
    """The items that fit into the step, and the requests preempted for them."""

    items: tuple[BatchItem, ...]
    preempted: tuple[Tracked, ...]


def share_tokens(order: Sequence[Tracked], starving: Set[str], max_step_tokens: int) -> dict[str, int]:
    """Tokens of this step by request_id; requests that are left out get none.

    Each decoding request gets one token and each starving request at least one, so that a long prompt ahead of it
    cannot block a starving request. The remaining tokens go to prefill chunks in the given order. A request gets none
    of them if another request computes its next block in this step: it reuses that block in the next step. At most
    max_step_tokens requests.
    """
    shares = {t.request_id: 1 for t in order if t.device_len - t.cached_len == 1 or t.request_id in starving}
    left = max_step_tokens - len(shares)
    assert left >= 0, "more requests were chosen than a step has tokens"
    being_computed: set[Key] = set()
    for tracked in [t for t in order if t.device_len - t.cached_len > 1]:
        if left == 0:
            break
        if tracked.next_key in being_computed:
            continue
        share = shares.get(tracked.request_id, 0)
        more = min(tracked.new_tokens - share, left)
        if more:
            shares[tracked.request_id] = share + more
            left -= more
            being_computed.update(tracked.keys(tracked.cached_len, tracked.cached_len + share + more))
    return shares


def grant_blocks(
    order: Sequence[Tracked],
    shares: Mapping[str, int],
    tables: BlockTables,
    tracked: Mapping[str, Tracked],
    ready: Sequence[Tracked],
) -> Grants:
    """Allocate blocks for each share, in order of importance; a share is granted completely or not at all.

    A request that starts reuses its blocks in the prefix cache. If allocations before it evicted some of them, its
    share covers less of its prompt.

    If blocks are short, requests are preempted (by recompute): first those that do not run in this step, then those
    further back in the order, newest arrival first in both groups. A request with a grant is never preempted, and none
    is preempted unless enough blocks become free. A request that was preempted and has not produced a token since comes
    last, and only an older request may preempt it. The oldest request therefore always progresses, and two requests
    cannot preempt each other forever. A request without KV preempts no other, unless it is the oldest ready one.
    """
    items: list[BatchItem] = []
    preempted: list[Tracked] = []
    granted: set[str] = set()
    victims: _Victims | None = None
    for candidate in order:
        request_id = candidate.request_id
        if request_id not in shares or (preempted and candidate in preempted):
            continue
        if candidate.chain is not None and candidate.status is RequestStatus.WAITING:
            candidate.place(tables.reuse(request_id, candidate.chain, 0, candidate.device_len))
        cached_len, device_len = candidate.cached_len, candidate.device_len
        share = min(shares[request_id], device_len - cached_len)
        wanted = cached_len + share
        table = tables.table(request_id)
        if len(table) * tables.block_size < wanted:  # usually false for a decoding request
            missing = tables.missing(request_id, wanted)
            if missing and (candidate.status is not RequestStatus.WAITING or candidate is ready[0]):
                victims = victims or _Victims(tables, tracked, shares.keys(), ready)
                taken = victims.for_blocks(missing, candidate, granted)
                for victim in taken:
                    tables.free(victim.request_id)
                    victim.preempt()
                preempted += taken
            if not tables.grow(request_id, wanted):
                if candidate.status is RequestStatus.WAITING:
                    tables.free(request_id)
                continue
            table = tables.table(request_id)
        granted.add(request_id)
        items.append(BatchItem(request_id, candidate.adapter, cached_len, share, table, wanted == device_len))
    return Grants(tuple(items), tuple(preempted))


class _Victims:
    """Requests that hold blocks, in preemption order. Built at most once per step."""

    def __init__(
        self, tables: BlockTables, tracked: Mapping[str, Tracked], chosen: Set[str], ready: Sequence[Tracked]
    ) -> None:
        self._tables = tables
        self._ready = set(ready)
        self._order = sorted(
            (tracked[holder] for holder in tables.holders),
            key=lambda t: (t.protected, t.request_id in chosen, -t.arrival),
        )

    def for_blocks(self, num_blocks: int, taker: Tracked, granted: Set[str]) -> list[Tracked]:
        """The requests to preempt to free `num_blocks` more; empty if that is impossible."""
        chosen: list[Tracked] = []
        users: dict[int, int] = {}  # users per block after the preemptions
        for victim in self._order:
            if num_blocks <= 0:
                break
            # A request that is not ready cannot run, so it could hold its blocks forever.
            shielded = victim.protected and victim.arrival < taker.arrival and victim in self._ready
            table = self._tables.table(victim.request_id)
            if table and not shielded and victim is not taker and victim.request_id not in granted:
                chosen.append(victim)
                for block in table:
                    users[block] = users.get(block, self._tables.num_users(block)) - 1
                    num_blocks -= not users[block]
        if num_blocks > 0:
            return []
        # Skip requests that share all their blocks: preempting them frees nothing.
        return [t for t in chosen if not all(users[block] for block in self._tables.table(t.request_id))]
