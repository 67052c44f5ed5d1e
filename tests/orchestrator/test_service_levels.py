"""Deadlines, priorities and fair shares: admission, refusal and order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from tests.orchestrator.checked_replica import SECONDS, SMALL_COSTS, CheckedReplica, CheckedReplicaConfig, all_resident
from tests.orchestrator.checked_replica import box as any_box
from tests.orchestrator.sample_requests import make_request
from vlora.orchestrator.admission.early_abort import Admission
from vlora.orchestrator.cost_model import Costs
from vlora.orchestrator.fairness import FairShares, Queued, adapter_of, scheduling_order, tenant_of
from vlora.orchestrator.policies.registry import POLICIES
from vlora.orchestrator.request_state import TrackedRequest
from vlora.types import Request

BOUNDED = sorted(POLICIES.keys() - {"merged_only"})


def box(policy: str = "unmerged_only", **settings: Any) -> CheckedReplica:
    """One second per step, all adapters resident."""
    return any_box(policy, **settings)


# -- early abort ------------------------------------------------------------------------------------------------------


class Minibatch:
    """S-LoRA's model of the machine: a number of free slots, and a fixed prefill time."""

    num_pending = 1

    def __init__(self, num_places: int, prefill_s: float) -> None:
        self.num_places = num_places
        self.prefill_s = prefill_s

    def has_room(self, tracked: TrackedRequest) -> bool:
        return self.num_places > 0

    def has_adapter(self, tracked: TrackedRequest) -> bool:
        return True

    def first_answer_s(self, tracked: TrackedRequest) -> float:
        return self.prefill_s

    def costs_known(self, tracked: TrackedRequest) -> bool:
        return True

    def add(self, tracked: TrackedRequest) -> None:
        self.num_places -= 1


class SLora:
    """S-LoRA's appendix B; R2 is measured in periods that leave requests waiting."""

    def __init__(self) -> None:
        self.r1: float | None = None
        self.r2: float | None = None

    def period(
        self, now: float, came: int, waiting: Sequence[tuple[float, str]], minibatch: Minibatch, tl_max: float
    ) -> tuple[list[str], list[str]]:
        """The aborted and the fetched requests, of (arrival time, name)."""
        self.r1 = came if self.r1 is None else 0.9 * self.r1 + 0.1 * came
        aborted = [name for rt, name in waiting if now - rt + minibatch.prefill_s > tl_max]
        left = sorted((rt, number, name) for number, (rt, name) in enumerate(waiting) if name not in aborted)
        if self.r2 is not None and self.r1 > self.r2:
            left.reverse()  # temporarily overloaded: newest first
        fetched = [name for _, _, name in left[: minibatch.num_places]]
        if len(left) > len(fetched):
            self.r2 = len(fetched) if self.r2 is None else 0.9 * self.r2 + 0.1 * len(fetched)
        return aborted, fetched


@settings(max_examples=scaled(200))
@given(
    periods=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 4), st.sampled_from([0.125, 0.5, 1.0])), min_size=1, max_size=40
    ),
    prefill_s=st.sampled_from([0.0, 0.5, 1.0]),
    tl_max=st.sampled_from([1.0, 2.5, 8.0]),
)
def test_admits_the_requests_that_s_lora_fetches(
    periods: list[tuple[int, int, float]], prefill_s: float, tl_max: float
) -> None:
    admission, oracle = Admission([]), SLora()
    waiting: dict[str, float] = {}
    now = 0.0
    for came, num_places, step_s in periods:
        for _ in range(came):
            name = f"r{len(waiting)}-{now}"
            waiting[name] = now
            admission.add(TrackedRequest(make_request(name, max_ttft_s=tl_max), now, None))
        pairs = [(rt, name) for name, rt in waiting.items()]
        aborted, fetched = oracle.period(now, came, pairs, Minibatch(num_places, prefill_s), tl_max)
        if waiting:
            decision = admission.decide(now, Minibatch(num_places, prefill_s))  # type: ignore[arg-type]
            refused = {tracked.request_id: needed_s for tracked, needed_s in decision.refused}
            assert [tracked.request_id for tracked in decision.admitted] == fetched
            assert set(aborted) <= refused.keys()
            for name, needed_s in refused.items():
                assert now - waiting[name] + needed_s > tl_max and needed_s >= prefill_s
                admission.remove(name)
            for name in (*fetched, *refused):
                del waiting[name]
        else:
            admission.end_idle_period()
        assert len(admission) == len(waiting)
        now += step_s


def test_an_unreachable_deadline_is_refused_at_once() -> None:
    simulation = box()
    simulation.add(make_request("x", max_tokens=9))
    for _ in range(3):
        simulation.step()
    simulation.add(make_request("late", max_ttft_s=0.5), make_request("fine", max_ttft_s=5.0, max_tokens=3))
    simulation.add(make_request("head", "a", head="kind", max_latency_s=0.5))
    simulation.step()
    assert simulation.end("head") == "deadline_unreachable", "max_latency_s also bounds the first answer"
    (output,) = simulation.outputs["late"]
    assert output.error is not None and output.error.code == "deadline_unreachable"
    message = output.error.message
    assert "the first answer of request 'late' is predicted to take" in message and "0.500 s are left" in message
    assert output.timings is not None and output.timings.latency_s == 0.0 and not output.token_ids
    simulation.run()
    assert simulation.end("fine") == simulation.end("x") == "length"
    assert simulation.first_answer_s("fine") == 1.0
    stats = simulation.stats
    assert (stats.num_finished, stats.num_failed, stats.num_waiting) == (2, 2, 0)


def test_an_admitted_request_is_answered_even_if_late() -> None:
    """The cost model is empty, so the request is admitted."""
    simulation = box()
    simulation.add(make_request("x", max_ttft_s=0.5, max_tokens=2))
    simulation.run()
    assert simulation.end("x") == "length" and simulation.first_answer_s("x") == 1.0


def test_requests_that_wait_for_kv_count_in_predictions() -> None:
    """Two of the admitted requests wait for blocks; the answer of a later one would follow theirs."""
    simulation = box(num_pages=10, max_adapter_pages=0, adapters={})
    simulation.add(*(make_request(f"r{i}", prompt=12, max_tokens=20, max_ttft_s=200.0) for i in range(3)))
    for _ in range(3):
        simulation.step()
    assert simulation.stats.num_waiting_for_kv == 2
    simulation.add(make_request("late", prompt=12, max_tokens=1, max_ttft_s=3.0))
    simulation.run()
    assert [simulation.end(name) for name in ("r0", "r1", "r2", "late")] == ["length"] * 3 + ["deadline_unreachable"]


@pytest.mark.parametrize("only_first", [True, False])
def test_admission_recovers_after_one_slow_step(only_first: bool) -> None:
    """One step of a hundred seconds, of a request without a deadline or of an admitted one."""
    simulation = box()
    simulation.machine.costs = Costs(base_s=100.0, merge_s=0.02)
    simulation.add(make_request("first", max_tokens=1, max_ttft_s=None if only_first else 500.0))
    simulation.run()
    simulation.machine.costs = SECONDS
    requests = [make_request(f"r{number}", max_tokens=2, max_ttft_s=4.0) for number in range(400)]
    simulation.run([(1000.0 + 10 * number, request) for number, request in enumerate(requests)])
    ends = [simulation.end(request.request_id) for request in requests]
    assert ends[0] == "deadline_unreachable"
    assert ends[200:] == ["length"] * 200


def test_short_requests_do_not_admit_long_ones_that_would_be_late_again_and_again() -> None:
    """One of a size that was never seen is tried; its answer then limits what is expected of the others."""
    costs = SECONDS._replace(base_s=0.01, token_s=0.01)
    simulation = box(max_step_tokens=32, costs=costs)
    sizes = [4 + number % 5 for number in range(60)] + [400, 5] * 100
    for number, size in enumerate(sizes):
        prompt = tuple(1 + (7 * number + place) % 900 for place in range(size))
        simulation.add(make_request(f"r{number}", prompt=prompt, max_tokens=1, max_ttft_s=1.0))
        simulation.run()
    ends = [simulation.end(f"r{number}") for number in range(len(sizes))]
    assert [end for end, size in zip(ends, sizes, strict=True) if size < 400] == ["length"] * 160
    assert ends[60::2].count("length") <= 1


@settings(max_examples=scaled(20))
@given(
    history=st.lists(
        st.tuples(st.sampled_from([1, 4, 40, 100, 300]), st.booleans(), st.sampled_from([1e-4, 1.0, 30.0])),
        min_size=1,
        max_size=8,
    ),
    repeats=st.integers(1, 5),
    bounds=st.lists(st.sampled_from([3, 100]), min_size=20, max_size=20),
)
def test_an_idle_machine_refuses_no_bound_far_above_anything_measured(
    history: list[tuple[int, bool, float]], repeats: int, bounds: list[int]
) -> None:
    """Prompts with and without a cached prefix, alike or not, on a machine whose speed changes."""
    simulation, longest_s, machine = box(max_step_tokens=32, block_size=2), 1.0, SMALL_COSTS
    for number, ((prompt, is_repeated, slow), bound) in enumerate(zip(history * repeats, bounds, strict=False)):
        simulation.machine.costs = machine._replace(base_s=0.01 * slow, token_s=0.001 * slow)
        tokens = (
            tuple(range(1, prompt + 1)) if is_repeated else tuple(1 + (7 * number + i) % 900 for i in range(prompt))
        )
        name, start_s = f"r{number}", simulation.clock.now
        simulation.add(make_request(name, prompt=tokens, max_tokens=1, max_ttft_s=bound * longest_s))
        simulation.run()
        if bound > 8:
            assert simulation.end(name) == "length", simulation.outputs[name][-1].error
        took_s = simulation.clock.now - start_s
        longest_s = took_s if number == 0 else max(longest_s, took_s)


def test_periods_without_admission_predict_no_endless_wait() -> None:
    """An average of admissions that has almost vanished is not the rate at which a later burst is admitted."""
    admission = Admission([])
    for number in range(402):
        burst = number in (0, 401)
        for place in range(4 if burst else 1):
            request = make_request(f"r{number}" + "x" * place, max_ttft_s=1e4)
            admission.add(TrackedRequest(request, float(number), None))
        assert not admission.decide(float(number), Minibatch(int(burst), 0.01)).refused  # type: ignore[arg-type]
        if not burst:
            admission.remove(f"r{number}")


def test_requests_outside_can_be_cancelled_and_load_no_adapter() -> None:
    simulation = box(max_batch_size=1)
    simulation.add(make_request("x", max_ttft_s=50.0), make_request("y", "b", max_ttft_s=50.0))
    simulation.step()
    assert simulation.scheduler.demand.needed_adapters == set()
    assert simulation.stats.num_waiting == 1
    output = simulation.scheduler.cancel("y")
    assert output is not None and output.finish_reason == "cancelled"
    assert simulation.scheduler.cancel("y") is None
    simulation.run()
    assert simulation.end("x") == "length"


def test_a_deadline_shorter_than_theta_interrupts_merged_steps() -> None:
    waited = {}
    for bound in (None, 3.0):
        simulation = box("algorithm1", theta_s=5.0, max_batch_size=4)
        simulation.add(*(make_request(f"a{i}", "a", max_tokens=20) for i in range(3)))
        for _ in range(4):
            simulation.step()
        simulation.add(make_request("b", "b", head="kind", max_ttft_s=bound))
        simulation.run()
        waited[bound] = simulation.first_answer_s("b")
    assert waited[3.0] <= 3.0 < 5.0 <= waited[None]


@pytest.mark.parametrize("policy", BOUNDED)
def test_urgent_requests_do_not_break_the_waiting_bound_of_others(policy: str) -> None:
    """One of them is admitted at a time, so two are ready: the bound is theta and two steps."""
    simulation = box(policy, max_batch_size=1, theta_s=4.0)
    flood = [(0.9 * i, make_request(f"u{i}", "a", head="kind", priority=9, max_ttft_s=3.0)) for i in range(40)]
    simulation.run([(0.0, make_request("old", "b", max_tokens=3)), *flood])
    assert sum(simulation.end(f"u{i}") == "head" for i in range(40)) > 20
    waits_since = 0.0
    for step in simulation.log:
        if any(item.request_id == "old" for item in step.batch.items):
            longest = max(step.end_s - step.start_s for step in simulation.log)
            assert step.start_s - waits_since <= step.theta_s + 2 * longest
            waits_since = step.end_s


def overload(simulation: CheckedReplica, rate: float, bound: float, seed: int = 0) -> list[Request]:
    """A hundred and fifty requests, a third of them heads, at `rate` per second, each with that deadline."""
    draws = random.Random(seed)
    arrivals, now = [], 0.0
    for number in range(150):
        now += draws.expovariate(rate)
        request = make_request(
            f"r{number}",
            draws.choices(("a", "b", "c"), (6, 3, 1))[0],
            prompt=draws.randint(8, 40),
            max_tokens=draws.randint(5, 30),
            head="kind" if number % 3 == 0 else None,
            max_ttft_s=bound,
        )
        arrivals.append((now, request))
    simulation.run(arrivals, max_steps=50_000)
    return [request for _, request in arrivals]


@pytest.mark.parametrize(
    "policy",
    [pytest.param(name, marks=() if name in ("algorithm1", "cost_based") else pytest.mark.slow) for name in BOUNDED],
)
def test_deadlines_and_throughput_hold_at_three_times_capacity(policy: str) -> None:
    def machine() -> CheckedReplica:
        adapters = {"a": 2, "b": 5, "c": 3}
        return all_resident(CheckedReplicaConfig(adapters=adapters, theta_s=0.05, num_pages=512), policy, pinned=False)

    full, simulation, bound = machine(), machine(), 0.6
    overload(full, rate=1e6, bound=1e6)
    capacity = 150 / full.clock.now
    names = [request.request_id for request in overload(simulation, rate=3 * capacity, bound=bound)]
    assert {simulation.end(name) for name in names} == {"length", "head", "deadline_unreachable"}
    answered = [name for name in names if simulation.end(name) != "deadline_unreachable"]
    assert sum(simulation.first_answer_s(name) <= bound for name in answered) >= 0.95 * len(answered)
    assert len(answered) / simulation.clock.now >= 0.8 * capacity
    for name in set(names) - set(answered):
        (output,) = simulation.outputs[name]
        assert output.timings is not None and output.timings.latency_s <= bound and not output.token_ids


# -- priority ---------------------------------------------------------------------------------------------------------


def order_of_ends(simulation: CheckedReplica) -> list[str]:
    simulation.run()
    return [item.request_id for step in simulation.log for item in step.batch.items if item.answers]


@pytest.mark.parametrize("bound_s", [None, 100.0])
def test_higher_priority_is_admitted_and_runs_first(bound_s: float | None) -> None:
    simulation = box(max_batch_size=1)
    for name, priority in (("low", -1), ("middle", 0), ("high", 5)):
        simulation.add(make_request(name, "a", head="kind", priority=priority, max_ttft_s=bound_s))
    assert order_of_ends(simulation) == ["high", "middle", "low"]


def test_starvation_precedes_priority() -> None:
    simulation = box(max_batch_size=1, theta_s=2.5)
    crowd = [(0.9 * i, make_request(f"high{i}", "a", head="kind", priority=9)) for i in range(30)]
    simulation.run([(0.0, make_request("low", "a", head="kind", priority=-9)), *crowd])
    assert 2.5 < simulation.first_answer_s("low") <= 2.5 + 3.0


# -- fair shares ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("by", ["adapter", "tenant"])
@settings(max_examples=scaled(12))
@given(
    weight=st.sampled_from([1.0, 2.0, 4.0]),
    flood=st.integers(30, 60),
    batch=st.integers(1, 6),
    policy=st.sampled_from(BOUNDED),
    bounded=st.booleans(),
    theta_s=st.sampled_from([0.01, 10.0]),
)
def test_shares_follow_the_weights_under_a_flood_of_another(
    by: str, weight: float, flood: int, batch: int, policy: str, bounded: bool, theta_s: float
) -> None:
    """While both have waiting requests, their weighted service differs by at most the largest requests of two batches.

    Between tenants with any policy, and if all requests of the flood wait longer than theta.
    """
    tenants = by == "tenant"
    names: dict[str, object] = {"tenant_weights" if tenants else "weights": {"y": weight}}
    if not tenants:
        policy, theta_s, names = "unmerged_only", 1e6, {**names, "adapters": {"x": 2, "y": 2}}
    simulation = box(policy, max_batch_size=batch, max_step_tokens=64, theta_s=theta_s, num_pages=320, **names)

    def request(name: str, number: int, max_tokens: int) -> Request:
        adapter, tenant = ("ab"[number % 2], name) if tenants else (name, None)
        bound = 1e6 if bounded else None
        return make_request(f"{name}{number}", adapter, tenant=tenant, max_tokens=max_tokens, max_ttft_s=bound)

    simulation.add(*(request("x", number, 8) for number in range(flood)))
    for _ in range(3):
        simulation.step()
    simulation.add(*(request("y", number, 1 + number % 8) for number in range(12)))
    came_s = simulation.clock.now
    simulation.run()
    served, waiting = {"x": 0.0, "y": 0.0}, {"x": flood, "y": 12}
    for step in simulation.log:
        for item in step.batch.items:
            name = item.request_id[0]
            waiting[name] -= item.answers and item.start == 0
            served[name] += item.num_tokens / (weight if name == "y" else 1) * (step.start_s >= came_s)
        if min(waiting.values()) <= 0:
            break
        assert abs(served["x"] - served["y"]) <= 2 * batch * (4 + 8)
    assert all(simulation.last(f"x{number}").error is None for number in range(flood)), "no request is refused"


def test_unused_shares_do_not_delay_others() -> None:
    fair, plain = (box(max_batch_size=2, weights=weights, theta_s=1e6) for weights in ({"a": 0.1, "b": 9.0}, {}))
    for simulation in (fair, plain):
        simulation.add(*(make_request(f"a{i}", "a") for i in range(7)))
        simulation.run()
    assert [step.batch for step in fair.log] == [step.batch for step in plain.log]


def queued(*names: str) -> list[TrackedRequest]:
    """Requests of an adapter and its version each."""
    return [TrackedRequest(make_request(name, f"{name[0]}@{name[1:]}"), 0.0, None) for name in names]


def test_requests_are_ordered_by_the_service_of_their_adapter() -> None:
    shares = FairShares({"*": 1.0, "b": 2.0}, adapter_of)

    def order(*waiting: TrackedRequest) -> list[str]:
        return [t.request_id for t in scheduling_order(list(waiting), [shares])]

    a1, a2, b1, b2, b3 = all_ = queued("a1", "a2", "b1", "b2", "b7")
    shares.add(a1)
    shares.count_service(a1, 100)
    for tracked in all_[1:]:
        shares.add(tracked)
    assert order(a1, b2) == ["a1", "b2"], "b starts at a's counter"
    # A prompt of four tokens: b's counters are 100, 102, 104; a's are 100, 104.
    assert order(a1, b1, b2, b3, a2) == ["a1", "b1", "b2", "b7", "a2"]
    shares.count_service(a2, 1)
    assert order(a1, b1, b2, b3, a2) == ["b1", "a1", "b2", "b7", "a2"]
    for tracked in all_:
        shares.remove(tracked)
    c1, a3 = queued("c1", "a3")
    shares.add(c1)
    shares.add(a3)
    assert order(a3, c1) == ["c1", "a3"], "a's service is remembered"


@pytest.mark.parametrize("name_of", [adapter_of, tenant_of])
@pytest.mark.parametrize(("own", "others", "expected"), [(100, 1000, 1000), (1000, 100, 1000), (0, 1000, 1000)])
def test_a_name_that_returns_starts_beside_the_others(
    name_of: Callable[[Queued], str | None], own: int, others: int, expected: int
) -> None:
    """A name that idled keeps its counter, and starts at the lowest counter of the others if its own is lower."""
    shares = FairShares({"*": 1.0}, name_of)
    idler, other, returned = (
        TrackedRequest(make_request(request_id, f"{name}@1", tenant=name), 0.0, None)
        for request_id, name in (("a1", "a"), ("b1", "b"), ("a2", "a"))
    )
    shares.add(idler)
    shares.add(other)
    shares.count_service(idler, own)
    shares.remove(idler)
    shares.count_service(other, others)
    shares.add(returned)
    assert shares.starts([returned, other]) == [expected, others]


# -- tenants ----------------------------------------------------------------------------------------------------------


def test_tenant_shares_precede_adapter_shares() -> None:
    adapters, tenants = FairShares({"*": 1.0}, adapter_of), FairShares({"*": 1.0}, tenant_of)
    found = [
        TrackedRequest(make_request(name, name[1], tenant=name[0]), 0.0, None) for name in ("xa1", "xa2", "xb", "ya")
    ]
    for tracked in found:
        adapters.add(tracked)
        tenants.add(tracked)
    # x's and y's first requests have equal counters, and x's others follow; among x's own, b's precedes a's second.
    order = [t.request_id for t in scheduling_order(found, [adapters, tenants])]
    assert order == ["xa1", "ya", "xb", "xa2"]


def test_requests_without_a_deadline_keep_their_positions_in_overload() -> None:
    admission = Admission([])
    for name, bound in (("old", None), ("b1", 100.0), ("b2", 100.0), ("new", None), ("b3", 100.0)):
        admission.add(TrackedRequest(make_request(name, max_ttft_s=bound), 0.0, None))
    admission.decide(0.0, Minibatch(0, 1.0))  # type: ignore[arg-type]  # learns that arrivals exceed admissions
    assert admission.overloaded
    decision = admission.decide(1.0, Minibatch(5, 1.0))  # type: ignore[arg-type]
    assert [t.request_id for t in decision.admitted] == ["old", "b3", "b2", "new", "b1"]
