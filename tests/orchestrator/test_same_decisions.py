"""The scheduler's optimizations change no decision: it matches a plain implementation without shortcuts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence, Set
from unittest import mock

import pytest
from hypothesis import given, settings

from tests.orchestrator import simulation as paper
from tests.orchestrator.simulation import Machine, Simulation
from tests.orchestrator.test_properties import Arrivals, admitted, crowd, every_policy, loads, machines
from vlora.orchestrator import POLICIES, Candidate, CostModel, Costs, Scheduler, make_policy
from vlora.orchestrator import scheduler as quick
from vlora.orchestrator.cost_model import _UNITS
from vlora.orchestrator.request_state import Tracked
from vlora.types import RequestStatus


class PlainCostModel(CostModel):
    @property
    def costs(self) -> Costs:
        each = [weight * unit for weight, unit in zip(self._weights, _UNITS, strict=True)]
        patch_s = self._encode_s / self._patches if self._patches else 0.0
        return Costs(*each, self._switch_s or 0.0, self._back_s or 0.0, self._short_lane, patch_s)


class PlainScheduler(Scheduler):
    """Recomputes every result from all requests."""

    def blocks_short(self) -> int:
        in_order = [
            t
            for status in (RequestStatus.RUNNING, RequestStatus.WAITING)
            for t in self._tracked.values()
            if t.status is status and t.entered
        ]
        left, wanted = self._max_step_tokens, 0
        for t in in_order[: self._max_batch_size]:
            tokens = min(t.new_tokens, left)
            left -= tokens
            if tokens:
                held = len(self._tables.table(t.request_id)) or self._tables.blocks_for(t.cached_len)
                wanted += max(0, self._tables.blocks_for(t.cached_len + tokens) - held)
        return max(0, wanted - self._tables.num_free_blocks)

    def _theta(self, ready: Sequence[Tracked], merged: str | None, costs: Costs) -> float:
        tokens = min(sum(heapq.nlargest(self._max_batch_size, (t.new_tokens for t in ready))), self._max_step_tokens)
        context = sum(heapq.nlargest(self._max_batch_size, (t.cached_len for t in ready)))
        lanes = min(len({t.adapter for t in ready}), self._max_batch_size)
        step_s = costs.merged_s(tokens, context) + costs.lanes_s(tokens, lanes)
        if merged is not None:
            step_s += costs.lanes_s(tokens, 1)
        if len(ready) < len(self._tracked) and any(t.images for t in self._tracked.values()):
            step_s *= 1 + quick.SHARE
        return max(self._theta_s, (1 + math.ceil(len(ready) / self._max_batch_size)) * (step_s + costs.merge_s))

    def _credits(self, requests: Iterable[Tracked], now: float, merged: str | None) -> list[float]:
        costs = self._cost.costs
        credits = []
        for t in requests:
            lanes = 0 if t.adapter == merged else (t.adapter is not None) + (merged is not None)
            tokens = min(t.new_tokens, self._max_step_tokens)
            short = tokens <= costs.short_lane
            lane_s, adapter_s = (costs.lane_s, costs.adapter_s) if short else (costs.long_lane_s, costs.long_adapter_s)
            fixed_s = costs.base_s + lanes * adapter_s
            if t.adapter != merged and merged is not None:
                fixed_s += costs.merge_s
            token_s = costs.token_s + lanes * lane_s
            own_s = fixed_s + token_s * tokens + costs.context_token_s * t.cached_len
            own_s += costs.patch_s * self._encoding.patches_left(t)
            credits.append(now - t.last_ran_s + own_s)
        return credits

    def _candidates(self, ready: Sequence[Tracked], now: float, merged: str | None, theta_s: float) -> list[Candidate]:
        starves = math.nextafter(theta_s, math.inf)
        candidates = []
        for t, credit in zip(ready, self._credits(ready, now, merged), strict=True):
            bounded = t.answer_by is not None and t.first_answer_s is None
            urgent = bounded and t.last_ran_s + credit + theta_s >= t.answer_by
            if urgent and credit < starves:
                credit = starves
            waits = now - t.last_ran_s, now - t.last_answer_s
            candidates.append(
                Candidate(t.request_id, t.adapter, credit, t.new_tokens, t.cached_len, t.is_head, urgent, *waits)
            )
        return candidates


def plain_share_tokens(order: Sequence[Tracked], starving: Set[str], max_step_tokens: int) -> dict[str, int]:
    shares = {t.request_id: 1 for t in order if t.new_tokens == 1 or t.request_id in starving}
    left = max_step_tokens - len(shares)
    being_computed = set()
    for tracked in order:
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


def decided(machine: Machine, arrivals: Arrivals, policy: str) -> str:
    """Every step with its times, and every answer, as text."""
    simulation = Simulation(machine, policy=make_policy(policy))
    simulation.run(arrivals)
    return repr(simulation.log) + repr(simulation.outputs)


def decided_plainly(machine: Machine, arrivals: Arrivals, policy: str) -> str:
    with (
        mock.patch.object(paper, "Scheduler", PlainScheduler),
        mock.patch.object(paper, "CostModel", PlainCostModel),
        mock.patch.object(quick, "share_tokens", plain_share_tokens),
    ):
        return decided(machine, arrivals, policy)


@settings(max_examples=60)
@given(machine=machines(), arrivals=loads(), policy=every_policy)
def test_every_decision_is_the_plain_one(machine: Machine, arrivals: Arrivals, policy: str) -> None:
    arrivals = admitted(machine, arrivals)
    assert decided(machine, arrivals, policy) == decided_plainly(machine, arrivals, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_also_where_memory_is_short_all_the_time(policy: str) -> None:
    machine, arrivals = crowd()
    assert decided(machine, arrivals, policy) == decided_plainly(machine, arrivals, policy)
