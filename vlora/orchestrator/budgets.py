"""Cuts a decision to the token budget, then to the KV blocks, preempting other requests if necessary."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

from vlora.memory.block_manager import BlockManager
from vlora.memory.prefix_cache import Key
from vlora.orchestrator.policies.base import Decision
from vlora.orchestrator.request_state import TrackedRequest
from vlora.types import Batch, BatchItem, Mode, RequestStatus


@dataclasses.dataclass
class StepBudget:
    """The most requests and tokens of a batch. May be changed between steps."""

    max_batch_size: int
    max_step_tokens: int

    def __post_init__(self) -> None:
        assert self.max_step_tokens >= self.max_batch_size >= 1


class Grants(NamedTuple):
    """The items that fit into the step, and the requests preempted for them."""

    items: tuple[BatchItem, ...]
    preempted: tuple[TrackedRequest, ...]


def fit_budgets(
    decision: Decision,
    starving: Set[str],
    ready: Sequence[TrackedRequest],
    tracked: Mapping[str, TrackedRequest],
    block_manager: BlockManager,
    budget: StepBudget,
) -> Batch | None:
    """The batch of a decision within the token and block budgets; None if all blocks are of the step in flight.

    If no selected request gets a block, because all blocks belong to requests that may not be preempted, the oldest
    ready requests run instead: the oldest one can always run.

    Args:
        decision: mode and requests, most important first.
        starving: ids of starving requests; each gets at least one token.
        ready: requests that may run, in order of arrival.
    """
    oldest = Decision(Mode.UNMERGED, None, tuple(t.request_id for t in ready[: budget.max_batch_size]))
    for mode, merged, order, _, saved_s in (decision, oldest):
        selected = [tracked[request_id] for request_id in order]
        assert mode is not Mode.MERGED or all(t.active == merged for t in selected), "merged mode serves one adapter"
        shares = share_tokens(selected, starving, budget.max_step_tokens)
        items, preempted = grant_blocks(selected, shares, block_manager, tracked, ready)
        if items:
            evicted = tuple(t.request_id for t in preempted)
            return Batch(_mode_of(merged, items), merged, items, evicted, saved_s=saved_s)
    assert block_manager.written, "the oldest request was admitted but does not fit"
    return None


def _mode_of(merged: str | None, items: Sequence[BatchItem]) -> Mode:
    """The effective mode: merged if all requests use the weights in place (W0 for the base model)."""
    if all(item.adapter == merged for item in items):
        return Mode.MERGED
    return Mode.UNMERGED if merged is None else Mode.MIXED


def share_tokens(order: Sequence[TrackedRequest], starving: Set[str], max_step_tokens: int) -> dict[str, int]:
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
        more = min(tracked.step_tokens - share, left)
        if more:
            shares[tracked.request_id] = share + more
            left -= more
            being_computed.update(tracked.keys(tracked.cached_len, tracked.cached_len + share + more))
    return shares


def grant_blocks(
    order: Sequence[TrackedRequest],
    shares: Mapping[str, int],
    block_manager: BlockManager,
    tracked: Mapping[str, TrackedRequest],
    ready: Sequence[TrackedRequest],
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
    preempted: list[TrackedRequest] = []
    granted: set[str] = set()
    victims: _Victims | None = None
    for candidate in order:
        request_id = candidate.request_id
        if request_id not in shares or (preempted and candidate in preempted):
            continue
        if candidate.chain is not None and candidate.status is RequestStatus.WAITING:
            # The step was decided for the active adapter: a longer hit ends where another one becomes active.
            end = candidate.cached_len + candidate.step_tokens
            known = min(end + 1, candidate.device_len)
            candidate.set_cached_len(block_manager.reuse(request_id, candidate.chain, 0, known))
        cached_len, device_len = candidate.cached_len, candidate.device_len
        share = min(shares[request_id], candidate.step_tokens)
        wanted = cached_len + share
        table = block_manager.table(request_id)
        if len(table) * block_manager.block_size < wanted:  # usually false for a decoding request
            missing = block_manager.missing(request_id, wanted)
            if missing and (candidate.status is not RequestStatus.WAITING or candidate is ready[0]):
                victims = victims or _Victims(block_manager, tracked, shares.keys(), ready)
                taken = victims.for_blocks(missing, candidate, granted)
                for victim in taken:
                    block_manager.free(victim.request_id)
                    victim.preempt()
                preempted += taken
            if not block_manager.grow(request_id, wanted):
                if candidate.status is RequestStatus.WAITING:
                    block_manager.free(request_id)
                continue
            table = block_manager.table(request_id)
        granted.add(request_id)
        items.append(BatchItem(request_id, candidate.active, cached_len, share, table, wanted == device_len))
    return Grants(tuple(items), tuple(preempted))


class _Victims:
    """Requests that hold blocks, in preemption order. Built at most once per step."""

    def __init__(
        self,
        block_manager: BlockManager,
        tracked: Mapping[str, TrackedRequest],
        chosen: Set[str],
        ready: Sequence[TrackedRequest],
    ) -> None:
        self._block_manager = block_manager
        self._ready = set(ready)
        self._order = sorted(
            (tracked[holder] for holder in block_manager.holders - block_manager.written),
            key=lambda t: (t.protected, t.request_id in chosen, -t.arrival),
        )

    def for_blocks(self, num_blocks: int, taker: TrackedRequest, granted: Set[str]) -> list[TrackedRequest]:
        """The requests to preempt to free `num_blocks` more; empty if that is impossible."""
        chosen: list[TrackedRequest] = []
        users: dict[int, int] = {}  # users per block after the preemptions
        for victim in self._order:
            if num_blocks <= 0:
                break
            # A request that is not ready cannot run, so it could hold its blocks forever.
            shielded = victim.protected and victim.arrival < taker.arrival and victim in self._ready
            table = self._block_manager.table(victim.request_id)
            if table and not shielded and victim is not taker and victim.request_id not in granted:
                chosen.append(victim)
                for block in table:
                    users[block] = users.get(block, self._block_manager.num_users(block)) - 1
                    num_blocks -= not users[block]
        if num_blocks > 0:
            return []
        # Skip requests that share all their blocks: preempting them frees nothing.
        return [t for t in chosen if not all(users[block] for block in self._block_manager.table(t.request_id))]


def blocks_short(requests: Collection[TrackedRequest], block_manager: BlockManager, budget: StepBudget) -> int:
    """Additional free KV blocks that the next step needs.

    Assumes that the step runs all running requests and, beside them, the oldest entered requests that have not started.
    Prefix-cache hits of the latter are not counted, because other requests may already use these blocks.
    """
    # Each request of the batch may start one more block.
    most = block_manager.blocks_for(budget.max_step_tokens) + budget.max_batch_size
    if most <= block_manager.num_free_blocks:
        return 0
    running = [t for t in requests if t.status is RequestStatus.RUNNING]
    waiting = (t for t in requests if t.entered and t.status is RequestStatus.WAITING)
    left, wanted = budget.max_step_tokens, 0
    for t in itertools.islice(itertools.chain(running, waiting), budget.max_batch_size):
        tokens = min(t.new_tokens, left)
        left -= tokens
        if tokens:
            held = len(block_manager.table(t.request_id)) or block_manager.blocks_for(t.cached_len)
            wanted += max(0, block_manager.blocks_for(t.cached_len + tokens) - held)
    return max(0, wanted - block_manager.num_free_blocks)
