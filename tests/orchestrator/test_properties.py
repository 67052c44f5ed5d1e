"""Properties for every load and machine: complete answers, budgets, bounded waiting, decisions without shortcuts."""

from __future__ import annotations

import dataclasses
import heapq
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from tests.orchestrator import checked_replica
from tests.orchestrator.checked_replica import SMALL_COSTS, CheckedReplica, CheckedReplicaConfig, all_resident
from tests.orchestrator.sample_requests import IMAGE_TOKEN, expected_tokens, make_request
from vlora.errors import PromptTooLong
from vlora.orchestrator import budgets, scheduler
from vlora.orchestrator.adapter_prefetch import MemoryDemand
from vlora.orchestrator.cost_model import FEATURE_SCALES, CostModel, Costs
from vlora.orchestrator.credits import Credits
from vlora.orchestrator.encoder_budget import SHARE
from vlora.orchestrator.policies.base import Candidate
from vlora.orchestrator.policies.registry import POLICIES, make_policy
from vlora.orchestrator.request_state import TrackedRequest
from vlora.types import Request, RequestStatus

ADAPTERS = {"a": 2, "b": 5, "c": 3, "d": 4}
Arrivals = list[tuple[float, Request]]

every_policy = st.sampled_from(sorted(POLICIES))
every_bounded_policy = st.sampled_from(sorted(POLICIES.keys() - {"merged_only"}))


@st.composite
def machines(draw: st.DrawFn) -> CheckedReplicaConfig:
    """Small machines, most of them short of some resource."""
    pages_per_block = draw(st.integers(1, 3))
    max_batch_size = draw(st.integers(1, 6))
    max_adapter_pages = draw(st.integers(5, 16))
    return CheckedReplicaConfig(
        num_pages=max_adapter_pages + pages_per_block * draw(st.integers(8, 30)),
        pages_per_block=pages_per_block,
        block_size=draw(st.sampled_from([1, 2, 4])),
        max_adapter_pages=max_adapter_pages,
        max_batch_size=max_batch_size,
        max_step_tokens=max_batch_size + draw(st.one_of(st.integers(0, 30), st.just(60))),
        theta_s=draw(st.sampled_from([0.001, 0.05, 0.5])),
        adapters=ADAPTERS,
        lossy=frozenset(draw(st.sets(st.sampled_from("abcd"), max_size=2))),
        load_s=draw(st.sampled_from([0.0, 0.0, 0.02, 0.3])),
        costs=SMALL_COSTS._replace(
            merge_s=draw(st.sampled_from([0.0, 0.02, 0.3])), long_adapter_s=draw(st.sampled_from([0.0, 0.0, 0.02]))
        ),
        prefix_cache=draw(st.booleans()),
        weights=draw(st.sampled_from([{}, {"*": 1.0}, {"a": 3.0, "c": 0.2}])),
        tenant_weights=draw(st.sampled_from([{}, {}, {"x": 2.0}])),
    )


@st.composite
def loads(draw: st.DrawFn, *, max_prompt: int = 24, max_tokens: int = 8) -> Arrivals:
    """Requests of all kinds in sequence; prompts of a kind share a prefix, with one of two images or none."""
    arrivals: Arrivals = []
    now, bounded = 0.0, draw(st.sampled_from([True, True, False]))
    for number in range(draw(st.integers(1, 14))):
        adapter = draw(st.sampled_from([None, *ADAPTERS]))
        length = draw(st.integers(1, max_prompt))
        shown = min(length - 1, draw(st.integers(0, 9)))
        picture = draw(st.sampled_from(["cat", "dog"]))
        request = make_request(
            f"r{number}",
            adapter,
            prompt=(1, *[IMAGE_TOKEN] * shown, *range(2, length - shown + 1)),
            images=[(picture, shown)] if shown else [],
            max_tokens=draw(st.integers(1, max_tokens)),
            head="h" if adapter is not None and draw(st.integers(0, 3)) == 0 else None,
            ignore_eos=draw(st.booleans()),
            max_latency_s=draw(st.sampled_from([None, None, None, 0.05, 1.0])) if bounded else None,
            max_ttft_s=draw(st.sampled_from([None, None, 0.05, 0.3, 2.0])) if bounded else None,
            priority=draw(st.sampled_from([0, 0, 0, 3, -10])),
            tenant=draw(st.sampled_from([None, "x", "y"])),
            adapter_from=0 if adapter is None else draw(st.one_of(st.just(0), st.integers(0, length - 1))),
        )
        arrivals.append((now, request))
        now += draw(st.sampled_from([0.0, 0.0, 0.01, 0.2]))
    return arrivals


def admitted(machine: CheckedReplicaConfig, arrivals: Arrivals) -> Arrivals:
    """The requests without those that this machine must refuse."""
    taken: Arrivals = []
    for when, request in arrivals:
        try:
            CheckedReplica(machine).add(request)
        except PromptTooLong:
            continue
        taken.append((when, request))
    return taken


def assert_answered(simulation: CheckedReplica, request: Request) -> None:
    """One finished output, at the end; tokens in order, none lost or repeated; a late request has an error."""
    outputs = simulation.outputs[request.request_id]
    assert [output.finished for output in outputs].count(True) == 1 and outputs[-1].finished
    last = outputs[-1]
    assert (last.error is not None) == (last.finish_reason in ("error", "cancelled"))
    tokens = [token for output in outputs for token in output.token_ids]
    wanted = expected_tokens(request)
    assert tokens == wanted[: len(tokens)]
    assert last.timings is not None and last.timings.num_completion_tokens == len(tokens)
    if last.finish_reason in ("stop", "length"):
        assert tokens == wanted
    if last.finish_reason == "head":
        assert last.head is not None and not tokens
    if last.error is None and request.max_latency_s is not None:
        assert last.timings.latency_s <= request.max_latency_s
    if last.error is not None and last.error.code == "deadline_unreachable":
        assert not tokens and last.timings.ttft_s is None, "refused after admission"
        bounds = [bound for bound in (request.max_ttft_s, request.max_latency_s) if bound is not None]
        assert last.timings.steps_by_mode == {} and bounds, "only requests with a deadline may be refused"


def served(
    machine: CheckedReplicaConfig,
    arrivals: Arrivals,
    policy: str,
    failing: Mapping[str, int] | None = None,
    cancels: Sequence[tuple[int, str]] = (),
) -> CheckedReplica:
    simulation = CheckedReplica(machine, policy=make_policy(policy), failing=failing)
    simulation.run(arrivals, cancels=cancels)
    return simulation


@settings(max_examples=scaled(150))
@given(
    machine=machines(),
    arrivals=loads(),
    failing=st.dictionaries(st.sampled_from([f"r{i}" for i in range(14)]), st.integers(1, 4), max_size=2),
    cancels=st.lists(st.tuples(st.integers(0, 30), st.sampled_from([f"r{i}" for i in range(14)])), max_size=3),
    policy=every_policy,
)
def test_every_request_ends_once_within_every_budget(
    machine: CheckedReplicaConfig,
    arrivals: Arrivals,
    failing: dict[str, int],
    cancels: list[tuple[int, str]],
    policy: str,
) -> None:
    """The simulation checks batch limits and all page bookkeeping in every step; its machine checks KV contents.

    The scheduler's shortcuts change no decision: a plain implementation makes the same.
    """
    arrivals = admitted(machine, arrivals)
    simulation = served(machine, arrivals, policy, failing, cancels)
    disturbed = failing.keys() | {name for _, name in cancels}
    for _, request in arrivals:
        assert_answered(simulation, request)
        if request.max_latency_s is request.max_ttft_s is None and request.request_id not in disturbed:
            assert simulation.end(request.request_id) in ("stop", "length", "head"), "memory pressure fails no request"
    stats = simulation.stats
    assert stats.num_finished + stats.num_failed + stats.num_cancelled == len(arrivals)
    assert stats.num_waiting == stats.num_running == 0
    assert simulation.block_manager.holders == frozenset()
    assert stats.num_steps == len(simulation.log)
    assert sum(stats.steps_by_mode.values()) == sum(bool(step.batch.items) for step in simulation.log)
    took = {(item.request_id, step.batch.mode) for step in simulation.log for item in step.batch.items}
    assert stats.requests_by_mode == Counter(mode.value for _, mode in took)
    with plainly():
        plain = served(machine, arrivals, policy, failing, cancels)
    assert (simulation.log, simulation.outputs) == (plain.log, plain.outputs)


# -- bounded waiting --------------------------------------------------------------------------------------------------


def longest_over_bound(simulation: CheckedReplica) -> float:
    """By how much the worst wait exceeds theta + ceil(ready / MaxBS) * longest step; at most 0 if the bound holds.

    A wait starts when a request enters the KV room, or at the end of its last step, and ends at the start of its next
    step. A preempted request has to enter again.
    """
    limit = simulation.config.max_batch_size
    longest = max(step.end_s - step.start_s for step in simulation.log)
    worst = float("-inf")
    waits: dict[str, tuple[float, float, int]] = {}  # since when, and the highest theta and number of ready since then
    for step in simulation.log:
        ran = {item.request_id for item in step.batch.items}
        for request_id in step.ready:
            since_s, theta_s, num_ready = waits.get(request_id, (step.start_s, 0.0, 1))
            theta_s, num_ready = max(theta_s, step.theta_s), max(num_ready, step.num_ready)
            waits[request_id] = since_s, theta_s, num_ready
            if request_id in ran:
                bound = theta_s + -(-num_ready // min(limit, num_ready)) * longest
                worst = max(worst, step.start_s - since_s - bound)
                waits[request_id] = step.end_s, 0.0, 1
        for request_id in step.batch.preempted:
            waits.pop(request_id, None)
    return worst


@settings(max_examples=scaled(100))
@given(machine=machines(), data=st.data(), policy=every_bounded_policy, roomy=st.booleans())
def test_waiting_is_bounded(machine: CheckedReplicaConfig, data: st.DataObject, policy: str, roomy: bool) -> None:
    """For long prompts with memory for all, and for prompts that fit in a step with memory for one full batch."""
    longest, most = (60 + 20, 14) if roomy else (24 + 8, machine.max_batch_size)
    blocks = most * -(-longest // machine.block_size)
    machine = dataclasses.replace(
        machine,
        max_adapter_pages=16,
        num_pages=(-(-16 // machine.pages_per_block) + blocks) * machine.pages_per_block,
        max_step_tokens=machine.max_step_tokens if roomy else most * longest,
    )
    simulation = all_resident(machine, policy)
    simulation.run(data.draw(loads(max_prompt=60, max_tokens=20) if roomy else loads()))
    assert longest_over_bound(simulation) <= 1e-9
    assert not roomy or simulation.stats.num_preemptions == 0


def crowd() -> tuple[CheckedReplicaConfig, Arrivals]:
    """Twelve simultaneous requests of three adapters on a machine with room for two or three requests."""
    machine = CheckedReplicaConfig(
        num_pages=16 + 16, max_adapter_pages=16, max_batch_size=2, max_step_tokens=64, theta_s=0.05, adapters=ADAPTERS
    )
    names = "aaabaaacaaab"
    return machine, [(0.0, make_request(f"r{i}", name, prompt=20, max_tokens=12)) for i, name in enumerate(names)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_crowd_waits_for_kv_within_the_bound(policy: str) -> None:
    """Merged only has no bound: the negative control of the measure."""
    machine, arrivals = crowd()

    def run() -> CheckedReplica:
        if policy == "merged_only":
            return served(machine, arrivals, policy)
        simulation = all_resident(machine, policy)
        simulation.run(arrivals)
        return simulation

    simulation = run()
    assert (longest_over_bound(simulation) > 1e-9) == (policy == "merged_only")
    assert policy == "merged_only" or max(step.num_ready for step in simulation.log) <= 3
    for _, request in arrivals:
        assert_answered(simulation, request)
    with plainly():
        plain = run()
    assert (simulation.log, simulation.outputs) == (plain.log, plain.outputs)


# -- a plain implementation, without the scheduler's shortcuts --------------------------------------------------------


class PlainCostModel(CostModel):
    @property
    def costs(self) -> Costs:
        each = [weight * unit for weight, unit in zip(self._weights, FEATURE_SCALES, strict=True)]
        patch_s = self._encode_s / self._patches if self._patches else 0.0
        paid = (self._switch_s or 0.0, self._back_s or 0.0, patch_s)
        return Costs._make((*each, *paid, *self._thresholds, self._error * 2 * math.sqrt(0.04)))


class PlainMemoryDemand(MemoryDemand):
    """Recomputes the demand from all requests."""

    def blocks_short(self) -> int:
        requests, blocks, budget = self.queue.admitted.values(), self.block_manager, self.budget
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
        costs, most = self.cost.costs, self.budget.max_batch_size
        tokens = min(sum(heapq.nlargest(most, (t.new_tokens for t in ready))), self.budget.max_step_tokens)
        context = sum(heapq.nlargest(most, (t.cached_len for t in ready)))
        lanes = min(len({t.active for t in ready}), most)
        step_s = costs.merged_s(tokens, context) + costs.lanes_s(tokens, lanes)
        if merged is not None:
            step_s += costs.lanes_s(tokens, 1)
        if len(ready) < len(admitted) and any(t.images for t in admitted):
            step_s *= 1 + SHARE
        return max(self.theta_s, (1 + math.ceil(len(ready) / most)) * (step_s + costs.merge_s))

    def of(self, requests: Iterable[TrackedRequest], now: float, merged: str | None) -> list[float]:
        costs = self.cost.costs
        credits = []
        for t in requests:
            lanes = 0 if t.active == merged else (t.active is not None) + (merged is not None)
            tokens = min(t.new_tokens, self.budget.max_step_tokens)
            short = tokens <= costs.short_lane
            lane_s, adapter_s = (costs.lane_s, costs.adapter_s) if short else (costs.long_lane_s, costs.long_adapter_s)
            fixed_s = costs.base_s + lanes * adapter_s
            if t.active != merged and merged is not None:
                fixed_s += costs.merge_s
            tokens_s = costs.token_s * max(0, tokens - costs.hidden_tokens)
            tokens_s += costs.thin_token_s * min(tokens, costs.thin_tokens)
            own_s = fixed_s + tokens_s + lanes * lane_s * tokens + costs.context_token_s * t.cached_len
            own_s += costs.patch_s * self.encoding.patches_left(t)
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


@contextmanager
def plainly() -> Iterator[None]:
    with (
        mock.patch.object(scheduler, "Credits", PlainCredits),
        mock.patch.object(scheduler, "MemoryDemand", PlainMemoryDemand),
        mock.patch.object(checked_replica, "CostModel", PlainCostModel),
        mock.patch.object(budgets, "share_tokens", plain_share_tokens),
    ):
        yield


# -- determinism ------------------------------------------------------------------------------------------------------


def digest() -> str:
    """All events of the same load under every policy, as text."""
    machine, arrivals = crowd()
    runs = [served(machine, arrivals, policy, {"r3": 2}, [(9, "r7")]) for policy in sorted(POLICIES)]
    return "".join(repr(run.log) + repr(run.outputs) for run in runs)


@pytest.mark.slow
def test_decisions_do_not_depend_on_the_hash_seed() -> None:
    program = "import zlib; from tests.orchestrator.test_properties import digest; print(zlib.crc32(digest().encode()))"
    sums = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(sums) == 1


def test_scheduling_imports_neither_torch_nor_numpy() -> None:
    program = """
import sys, vlora.orchestrator, vlora.memory.block_manager, vlora.memory.adapter_cache, vlora.memory.prefix_cache
assert not {"torch", "numpy"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
