"""The scheduler's optimizations change no decision: it matches a plain implementation without shortcuts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence, Set
from unittest import mock

import pytest
from hypothesis import given, settings

from tests.example_counts import scaled
from tests.orchestrator import checked_replica
from tests.orchestrator.checked_replica import CheckedReplica, CheckedReplicaConfig
from tests.orchestrator.test_properties import Arrivals, admitted, crowd, every_policy, loads, machines
from vlora.orchestrator import POLICIES, Candidate, CostModel, Costs, budgets, make_policy, scheduler
from vlora.orchestrator.adapter_prefetch import MemoryDemand
from vlora.orchestrator.cost_model import FEATURE_SCALES
from vlora.orchestrator.credits import Credits
from vlora.orchestrator.encoder_budget import SHARE
from vlora.orchestrator.request_state import TrackedRequest
from vlora.types import RequestStatus


class PlainCostModel(CostModel):
    @property
    def costs(self) -> Costs:
        each = [weight * unit for weight, unit in zip(self._weights, FEATURE_SCALES, strict=True)]
        patch_s = self._encode_s / self._patches if self._patches else 0.0
        return Costs._make((*each, self._switch_s or 0.0, self._back_s or 0.0, patch_s, *self._thresholds))


class PlainMemoryDemand(MemoryDemand):
    """Recomputes the demand from all requests."""

    def blocks_short(self) -> int:
        requests, blocks, budget = self._queue.admitted.values(), self._block_manager, self._budget
        running_first = [
            t
            for status in (RequestStatus.RUNNING, RequestStatus.WAITING)
            for t in requests
            if t.status is status and t.entered
        ]
        left, wanted = budget.max_step_tokens, 0
        for t in running_first[: budget.max_batch_size]:
            tokens = min(t.new_tokens, left)
            left -= tokens
            if tokens:
                held = len(blocks.table(t.request_id)) or blocks.blocks_for(t.cached_len)
                wanted += max(0, blocks.blocks_for(t.cached_len + tokens) - held)
        return max(0, wanted - blocks.num_free_blocks)


class PlainCredits(Credits):
    """Computes each credit on its own, from the formula."""

    def theta(self, ready: Sequence[TrackedRequest], merged: str | None, admitted: Collection[TrackedRequest]) -> float:
        costs, most = self._cost.costs, self._budget.max_batch_size
        tokens = min(sum(heapq.nlargest(most, (t.new_tokens for t in ready))), self._budget.max_step_tokens)
        context = sum(heapq.nlargest(most, (t.cached_len for t in ready)))
        lanes = min(len({t.active for t in ready}), most)
        step_s = costs.merged_s(tokens, context) + costs.lanes_s(tokens, lanes)
        if merged is not None:
            step_s += costs.lanes_s(tokens, 1)
        if len(ready) < len(admitted) and any(t.images for t in admitted):
            step_s *= 1 + SHARE
        return max(self._theta_s, (1 + math.ceil(len(ready) / most)) * (step_s + costs.merge_s))

    def of(self, requests: Iterable[TrackedRequest], now: float, merged: str | None) -> list[float]:
        costs = self._cost.costs
        credits = []
        for t in requests:
            lanes = 0 if t.active == merged else (t.active is not None) + (merged is not None)
            tokens = min(t.new_tokens, self._budget.max_step_tokens)
            short = tokens <= costs.short_lane
            lane_s, adapter_s = (costs.lane_s, costs.adapter_s) if short else (costs.long_lane_s, costs.long_adapter_s)
            fixed_s = costs.base_s + lanes * adapter_s
            if t.active != merged and merged is not None:
                fixed_s += costs.merge_s
            tokens_s = costs.token_s * max(0, tokens - costs.hidden_tokens)
            tokens_s += costs.thin_token_s * min(tokens, costs.thin_tokens)
            own_s = fixed_s + tokens_s + lanes * lane_s * tokens + costs.context_token_s * t.cached_len
            own_s += costs.patch_s * self._encoding.patches_left(t)
            credits.append(now - t.last_ran_s + own_s)
        return credits

    def candidates(
        self, ready: Sequence[TrackedRequest], now: float, merged: str | None, theta_s: float
    ) -> list[Candidate]:
        starves = math.nextafter(theta_s, math.inf)
        candidates = []
        for t, credit in zip(ready, self.of(ready, now, merged), strict=True):
            urgent = False
            if t.answer_by is not None and t.first_answer_s is None:
                urgent = t.last_ran_s + credit + theta_s >= t.answer_by
            if urgent and credit < starves:
                credit = starves
            waits = now - t.last_ran_s, now - t.last_answer_s
            candidates.append(
                Candidate(t.request_id, t.active, credit, t.new_tokens, t.cached_len, t.is_head, urgent, *waits)
            )
        return candidates


def plain_share_tokens(order: Sequence[TrackedRequest], starving: Set[str], max_step_tokens: int) -> dict[str, int]:
    shares = {t.request_id: 1 for t in order if t.new_tokens == 1 or t.request_id in starving}
    left = max_step_tokens - len(shares)
    being_computed = set()
    for tracked in order:
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


def decided(machine: CheckedReplicaConfig, arrivals: Arrivals, policy: str) -> str:
    """Every step with its times, and every answer, as text."""
    simulation = CheckedReplica(machine, policy=make_policy(policy))
    simulation.run(arrivals)
    return repr(simulation.log) + repr(simulation.outputs)


def decided_plainly(machine: CheckedReplicaConfig, arrivals: Arrivals, policy: str) -> str:
    with (
        mock.patch.object(scheduler, "Credits", PlainCredits),
        mock.patch.object(scheduler, "MemoryDemand", PlainMemoryDemand),
        mock.patch.object(checked_replica, "CostModel", PlainCostModel),
        mock.patch.object(budgets, "share_tokens", plain_share_tokens),
    ):
        return decided(machine, arrivals, policy)


@settings(max_examples=scaled(60))
@given(machine=machines(), arrivals=loads(), policy=every_policy)
def test_decisions_equal_the_plain_implementation(
    machine: CheckedReplicaConfig, arrivals: Arrivals, policy: str
) -> None:
    arrivals = admitted(machine, arrivals)
    assert decided(machine, arrivals, policy) == decided_plainly(machine, arrivals, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_decisions_equal_the_plain_ones_under_memory_pressure(policy: str) -> None:
    machine, arrivals = crowd()
    assert decided(machine, arrivals, policy) == decided_plainly(machine, arrivals, policy)
