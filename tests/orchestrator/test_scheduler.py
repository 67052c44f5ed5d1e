"""Scheduler behavior, one aspect per test: budgets, ends of requests, adapters, preemption, counters."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence, Set
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from tests.orchestrator.checked_replica import CheckedReplica, Script, box, shares, tight
from tests.orchestrator.sample_requests import EOS, make_request, sampled_token
from vlora.errors import PromptTooLong
from vlora.orchestrator.adapter_prefetch import ResidencyQuantum
from vlora.orchestrator.cost_model import CostModel, Costs, StepSize
from vlora.orchestrator.policies.base import Candidate, Decision, PolicyState
from vlora.orchestrator.policies.registry import POLICIES, make_policy
from vlora.orchestrator.request_state import TrackedRequest
from vlora.types import ErrorValue, MemoryView, Mode

NOTHING = MemoryView(resident=frozenset(), mergeable=frozenset())


# -- token budget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("orders", "prompts", "theta_s", "steps"),
    [
        # A long prompt runs in chunks, its answer continues.
        ((), {"x": 26}, 10.0, [{"x": (0, 10)}, {"x": (10, 20)}, {"x": (20, 26)}, {"x": (26, 27)}]),
        # Decoding requests get their token before any prefill.
        (("xy", "zxy"), {"x": 3, "y": 4, "z": 30}, 10.0, [..., {"z": (0, 8), "x": (3, 4), "y": (4, 5)}]),
        # Chunks follow the order of the policy.
        (("zxy",), {"x": 7, "y": 7, "z": 7}, 10.0, [{"z": (0, 7), "x": (0, 3)}]),
        # A starving request runs beside a prompt that fills the step.
        (("x", "x", "x", "xy"), {"x": 60, "y": 5}, 2.5, [..., ..., ..., {"x": (30, 39), "y": (0, 1)}]),
    ],
)
def test_the_tokens_of_a_step(
    orders: tuple[str, ...], prompts: dict[str, int], theta_s: float, steps: list[object]
) -> None:
    simulation = box(Script(*orders), max_step_tokens=10, theta_s=theta_s)
    simulation.add(*(make_request(name, prompt=prompt) for name, prompt in prompts.items()))
    for expected in steps:
        found = simulation.step()
        assert found is not None and (expected is ... or shares(found) == expected)
        for item in found.items:
            assert item.answers == (item.start + item.num_tokens >= prompts[item.request_id])


# -- ends of requests -------------------------------------------------------------------------------------------------


ENDS_SECOND = next(f"r{i}" for i in range(1000) if sampled_token(f"r{i}", 1) == EOS)


@pytest.mark.parametrize(
    ("settings", "end", "num_tokens"),
    [
        ({"head": "kind", "prompt": 9, "max_tokens": 50}, "head", 0),
        ({"max_tokens": 5, "ignore_eos": False}, "stop", 2),
        ({"max_tokens": 5}, "length", 5),
        # A late answer is an error; its tokens are returned.
        ({"max_tokens": 3, "max_latency_s": 2.5}, "deadline_missed", 3),
        ({"max_tokens": 3, "max_latency_s": 3.5}, "length", 3),
        ({"head": "kind", "max_latency_s": 0.9}, "deadline_missed", 0),
        ({"head": "kind", "max_latency_s": 1.5}, "head", 0),
    ],
)
def test_the_end_of_a_request(settings: dict[str, Any], end: str, num_tokens: int) -> None:
    simulation = box()
    simulation.add(make_request(ENDS_SECOND, "a", **settings))
    simulation.run()
    assert simulation.end(ENDS_SECOND) == end and (simulation.last(ENDS_SECOND).head is not None) == (end == "head")
    assert len(simulation.tokens(ENDS_SECOND)) == num_tokens and len(simulation.log) == max(1, num_tokens)


def test_cancelling_frees_memory_and_returns_one_output() -> None:
    simulation = box()
    scheduler = simulation.scheduler
    simulation.add(make_request("x"), make_request("y"))
    batch = scheduler.schedule(NOTHING)
    assert batch is not None and simulation.block_manager.holders == {"x", "y"}
    result = simulation.machine.run(batch)
    output = scheduler.cancel("x")
    assert output is not None and output.finish_reason == "cancelled"
    assert output.error is not None and output.error.code == "aborted"
    assert scheduler.cancel("x") is None and scheduler.fail("x", ErrorValue("error", "late")) is None
    assert [output.request_id for output in scheduler.record(batch, result)] == ["y"], "cancelled within the step"
    assert simulation.block_manager.holders == {"y"}
    simulation.check_integrity()


def test_a_head_over_image_tokens_waits_for_its_adapter() -> None:
    """Its rows are read where the base model computes them; other requests begin without the adapter."""
    simulation = box()
    head = msgspec.structs.replace(make_request("h", "a", head="boxes", prompt=9, adapter_from=6), read_from=1)
    simulation.add(head, make_request("w", "a", prompt=9, adapter_from=6))
    assert shares(simulation.scheduler.schedule(NOTHING)) == {"w": (0, 6)}
    simulation = box()
    simulation.add(head)
    assert simulation.scheduler.schedule(NOTHING) is None
    assert shares(simulation.step_with("a")) == {"h": (0, 6)}


def test_a_step_is_scheduled_while_its_requests_are_in_the_last_one() -> None:
    simulation = box()
    scheduler, machine = simulation.scheduler, simulation.machine
    simulation.add(make_request("x", prompt=3, max_tokens=2), make_request("y", prompt=4, max_tokens=9))
    batches, tokens = [scheduler.schedule(NOTHING)], []
    for expected in ({"x": (3, 4), "y": (4, 5)}, {"y": (5, 6)}, {"y": (6, 7)}):
        in_flight = batches[-1]
        assert in_flight is not None
        scheduler.advance(in_flight)
        batches.append(scheduler.schedule(NOTHING))
        assert shares(batches[-1]) == expected, "x has its last token in the second step"
        tokens.append([output.token_ids for output in scheduler.finish(in_flight, machine.run(in_flight))])
        simulation.check_integrity()
    assert tokens == [[(sampled_token(name, n),) for name in names] for n, names in enumerate(("xy", "xy", "y"))]


def test_a_step_in_flight_counts_for_nothing_after_the_end_of_its_request() -> None:
    name = next(f"r{i}" for i in range(1000) if sampled_token(f"r{i}", 0) == EOS)
    simulation = box()
    scheduler, machine = simulation.scheduler, simulation.machine
    simulation.add(make_request(name, max_tokens=9, ignore_eos=False))
    first = scheduler.schedule(NOTHING)
    assert first is not None
    scheduler.advance(first)
    second = scheduler.schedule(NOTHING)
    assert second is not None
    (output,) = scheduler.finish(first, machine.run(first))
    assert output.finish_reason == "stop"
    scheduler.advance(second)
    assert scheduler.finish(second, machine.run(second)) == () and not scheduler.has_work
    simulation.check_integrity()


def test_ended_requests_are_released_before_their_deadline() -> None:
    def num_held() -> int:
        gc.collect()
        return sum(type(each) is TrackedRequest for each in gc.get_objects())

    simulation, before = box(), num_held()
    for round_ in range(20):
        for bound in (1e6, math.inf):
            simulation.add(make_request(f"{round_}-{bound}", max_tokens=1, max_latency_s=bound))
        simulation.run()
    assert num_held() - before <= 8


def test_deadlines_apply_to_requests_without_a_resident_adapter() -> None:
    simulation = box()
    simulation.scheduler.add(make_request("x", "a", max_latency_s=1.0))
    assert simulation.scheduler.schedule(NOTHING) is None
    simulation.clock.now = 1.5
    assert simulation.scheduler.schedule(NOTHING) is None
    assert simulation.scheduler.has_work, "its finished output is still to be delivered"
    (output,) = simulation.scheduler.drain_outputs()
    assert output.error is not None and output.error.code == "deadline_missed"
    assert not simulation.scheduler.has_work and simulation.scheduler.drain_outputs() == ()


def test_a_request_too_long_for_memory_is_refused() -> None:
    simulation = box(num_pages=32 + 5)  # 5 blocks of 4 tokens beside the adapters
    simulation.add(make_request("fits", prompt=16, max_tokens=4))
    with pytest.raises(PromptTooLong, match="21 tokens, or 6 KV blocks of 4 tokens; 5 blocks are available"):
        simulation.add(make_request("long", prompt=16, max_tokens=5))
    simulation.add(make_request("head", "a", head="kind", prompt=20, max_tokens=500))
    simulation.run()
    assert (simulation.end("fits"), simulation.end("head")) == ("length", "head")


# -- adapters ---------------------------------------------------------------------------------------------------------


def test_adapters_are_ordered_by_the_credit_of_their_requests() -> None:
    simulation = box()
    demand = simulation.scheduler.demand
    for name, adapter in (("x", "b"), ("y", "a"), ("base", None)):
        simulation.add(make_request(name, adapter))
        simulation.scheduler.admit(frozenset())
        simulation.clock.now += 1.0
    assert list(shares(simulation.step_with())) == ["base"], "only requests with a resident adapter run"
    assert demand.adapters_by_credit() == ("b", "a") and demand.adapters_in_use() == frozenset()
    simulation.step_with("b")
    assert demand.adapters_by_credit() == ("a", "b"), "x has just run"
    assert demand.adapters_in_use() == {"b"}


@pytest.mark.parametrize("loading", ["b", ""])
def test_running_requests_keep_their_adapter_during_another_load(loading: str) -> None:
    """Evicting adapters of running requests helps a request without room, but does not speed up a slow file read."""
    simulation = box()
    simulation.add(make_request("runs", "a", max_tokens=50))
    simulation.scheduler.add(make_request("waits", "b"))
    simulation.scheduler.admit(frozenset("a"))
    for _ in range(2):
        simulation.clock.now += 5.0
        assert list(shares(simulation.step_with("a", loading))) == ["runs"]
    assert simulation.scheduler.demand.adapters_in_use() == (frozenset("a") if loading else frozenset())


class Merging:
    """Runs all requests in one mode with adapter a merged, if it may be."""

    def __init__(self, mode: Mode = Mode.MIXED) -> None:
        self.mode = mode
        self.seen: list[str | None] = []

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        self.seen.append(state.merged_adapter)
        order = tuple(c.request_id for c in ready)
        return Decision(self.mode, "a", order) if "a" in state.mergeable else Decision(Mode.UNMERGED, None, order)


def test_an_evicted_adapter_does_not_count_as_merged() -> None:
    policy = Merging()
    simulation = box(policy)
    simulation.add(make_request("x"), make_request("y"))
    for resident in ("a", "a", ""):
        simulation.step_with(resident)
    assert policy.seen == [None, "a", None]


def test_merged_mode_with_other_adapters_is_rejected() -> None:
    simulation = box(Merging(Mode.MERGED))
    simulation.add(make_request("x", "a"), make_request("y", "b"))
    with pytest.raises(AssertionError, match="merged mode serves one adapter"):
        simulation.step()


# -- preemption -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_kv_admission")
@pytest.mark.parametrize(
    ("first", "second", "num_blocks", "prompts", "preempted", "ran"),
    [
        pytest.param("wxy", "z", 7, "z8 w7 x7 y7", "y", "z", id="the newest paused request first"),
        pytest.param("wxy", "wxy", 3, "w4 x4 y4", "y", "w", id="selected ones if none is paused; none is left for x"),
        pytest.param("wxy", "xy", 3, "w4 x4 y4", "w", "x", id="a paused one before a newer selected one"),
        pytest.param("wx", "wyx", 8, "y20 w14 x3", "", "wx", id="none without benefit: y would not fit with x's"),
        pytest.param("x", "vx", 3, "z9 x9 v9", "", "x", id="none for a newer request without KV"),
        pytest.param("x", "zx", 3, "z9 x9 v9", "x", "z", id="one for the oldest request without KV"),
    ],
)
def test_which_requests_are_preempted(
    first: str, second: str, num_blocks: int, prompts: str, preempted: str, ran: str
) -> None:
    simulation = tight(Script(first, second), num_blocks)
    names = [each[0] for each in prompts.split()]
    simulation.add(*(make_request(each[0], prompt=int(each[1:]), max_tokens=3) for each in prompts.split()))
    simulation.step()
    batch = simulation.step()
    assert batch is not None and "".join(batch.preempted) == preempted and "".join(shares(batch)) == ran
    assert simulation.block_manager.holders == {*first, *ran} - {*preempted}
    simulation.run()
    assert {simulation.end(name) for name in names} == {"length"}


def test_preempted_requests_enter_before_new_ones() -> None:
    simulation = box(num_pages=4, max_adapter_pages=0)
    for _ in range(1000):
        simulation.scheduler.queue.kv.lengths.observe(1, 16)
    simulation.add(*(make_request(name, prompt=4, max_tokens=9) for name in "wxyz"), make_request("late", prompt=1))
    simulation.step()
    assert simulation.block_manager.holders == {"w", "x", "y", "z"}, "answers are expected to be one token long"
    simulation.run()
    starts = [item.request_id for step in simulation.log for item in step.batch.items if item.start == 0]
    assert starts[:4] == ["w", "x", "y", "z"] and starts[-1] == "late"
    assert sorted(starts[4:-1]) == ["x", "y", "z"], "each was preempted once and entered before the new request"
    assert {simulation.end(name) for name in ("w", "x", "y", "z", "late")} == {"length"}


@pytest.mark.usefixtures("no_kv_admission")
def test_the_oldest_ready_request_preempts_an_older_protected_one_that_is_not_ready() -> None:
    simulation = tight(Script("x", "y", "x", "y"), 3, max_step_tokens=8)
    simulation.add(make_request("x", "a", prompt=10, max_tokens=2), make_request("y", prompt=10, max_tokens=2))
    for resident, preempted in (("a", ""), ("", "x"), ("a", "y"), ("", "x")):  # x cannot run without its adapter
        assert simulation.step_with(resident).preempted == tuple(preempted)


@pytest.mark.usefixtures("no_kv_admission")
def test_the_oldest_runs_if_no_selected_request_gets_blocks() -> None:
    simulation = tight(Script(*"xxxxxxy"), 3)
    simulation.add(make_request("x", "a", prompt=4, max_tokens=8), make_request("y", prompt=4, max_tokens=8))
    batches = [simulation.step_with("a") for _ in range(7)]
    assert batches[6].mode is Mode.UNMERGED and list(shares(batches[6])) == ["x"], "no block is available to y"


# -- counters ---------------------------------------------------------------------------------------------------------


def test_timings_start_at_arrival_and_requests_are_counted_by_state() -> None:
    simulation = box(Script("x", "y"))
    simulation.add(make_request("x", max_tokens=9), make_request("y", prompt=5, max_tokens=2))
    simulation.step()
    stats = simulation.stats
    assert (stats.num_waiting, stats.num_running, stats.total_blocks - stats.free_blocks) == (1, 1, 1)
    simulation.step()
    simulation.step()
    timings = simulation.last("y").timings
    assert timings is not None
    assert (timings.queue_s, timings.ttft_s, timings.latency_s) == (1.0, 2.0, 3.0)
    assert (timings.num_prompt_tokens, timings.num_completion_tokens) == (5, 2)


def test_the_cost_model_observes_the_contents_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = box(Merging())
    samples: list[tuple[StepSize, float]] = []
    monkeypatch.setattr(CostModel, "observe_step", lambda self, *sample: samples.append(sample))
    simulation.add(*(make_request(f"r{i}", adapter, prompt=i) for i, adapter in ((3, "a"), (5, "b"), (2, None))))
    simulation.step()
    simulation.step()
    # Tokens of the merged adapter have no lane, those of the other adapter their own; all others share the branch.
    first = StepSize(10, (5, 5 + 2), 0, mode=Mode.MIXED, changed=True)
    assert samples == [(first, 1.0), (StepSize(3, (1, 1 + 1), 10, mode=Mode.MIXED), 1.0)]


# -- adapters and KV share one memory ---------------------------------------------------------------------------------


def crowded(num_pages: int, adapters: str) -> CheckedReplica:
    """Adapters of two pages, one of the KV blocks' size, in memory."""
    simulation = box(num_pages=num_pages, max_adapter_pages=2 * len(adapters), adapters=dict.fromkeys(adapters, 2))
    for name in adapters:
        simulation.adapter_cache.allocate(name, 2)
    return simulation


@pytest.mark.parametrize(
    ("num_pages", "adapters", "users", "left", "kept", "last"),
    [
        # The least recently used one of those that are not needed; requests renew their adapter.
        (12, "ucw", "uu", {"w", "u"}, frozenset(), {"u"}),
        # Needed and merged ones are not evicted: the requests run one after the other.
        (8, "ab", "ab", {"a", "b"}, {"a"}, {"a"}),
    ],
)
def test_unneeded_adapters_are_evicted_before_requests_are_preempted(
    num_pages: int, adapters: str, users: str, left: set[str], kept: Set[str], last: set[str]
) -> None:
    """Adapters of two pages, one of the KV blocks' size, in memory from the start."""
    simulation = box(num_pages=num_pages, max_adapter_pages=2 * len(adapters), adapters=dict.fromkeys(adapters, 2))
    for name in adapters:
        simulation.adapter_cache.allocate(name, 2)
    simulation.add(*(make_request(f"r{i}", name, prompt=8, max_tokens=8) for i, name in enumerate(users)))
    simulation.run()
    assert simulation.stats.num_preemptions == 0 and simulation.adapter_cache.resident == left
    if users == "ab":
        assert [len(step.batch.items) for step in simulation.log] == [1] * 16
    simulation.adapter_cache.evict_for_blocks(len(last), kept=kept)
    assert simulation.adapter_cache.resident == last


# -- more adapters than memory holds: each stays for a quantum --------------------------------------------------------


@pytest.mark.parametrize(
    ("views", "expired", "not_expired"),
    [
        # "a" took 4 s, of which an eighth counts; then "b" 4 s more: 0.5 + (4 - 0.5) / 8.
        ([("", "a", 0.0), ("", "ab", 1.0), ("a", "b", 4.0)], {"a": 8.0}, {"a": 7.9, "unknown": 100.0}),
        ([("", "a", 0.0), ("", "ab", 1.0), ("a", "b", 4.0), ("ab", "", 5.0)], {"b": 12.5}, {"b": 12.4}),
        # Time without a running load is not load time.
        ([("", "a", 0.0), ("", "", 1.0), ("", "a", 90.0), ("a", "", 91.0)], {"a": 92.0}, {"a": 91.9}),
        # The quantum restarts when an adapter is loaded again.
        ([("", "a", 0.0), ("a", "", 1.0), ("", "", 50.0), ("a", "", 51.0)], {}, {"a": 51.5}),
        # Loads take no time.
        ([("a", "", 3.0)], {"a": 3.0}, {}),
    ],
)
def test_the_quantum_is_a_multiple_of_the_load_time(
    views: list[tuple[str, str, float]], expired: dict[str, float], not_expired: dict[str, float]
) -> None:
    quantum = ResidencyQuantum()
    for resident, loading, now in views:
        view = MemoryView(resident=frozenset(resident), mergeable=frozenset(), loading=frozenset(loading))
        quantum.observe(view, now)
    assert all(quantum.has_expired(name, now) for name, now in expired.items())
    assert not any(quantum.has_expired(name, now) for name, now in not_expired.items())


@settings(max_examples=scaled(15))
@given(
    policy=st.sampled_from(sorted(POLICIES.keys() - {"merged_only"})),
    num_adapters=st.integers(2, 6),
    num_places=st.integers(1, 3),
    load_s=st.sampled_from([0.01, 0.05]),
    each=st.integers(1, 2),
)
def test_the_wait_for_an_adapter_is_bounded_by_the_quanta_before_it(
    policy: str, num_adapters: int, num_places: int, load_s: float, each: int
) -> None:
    """Answers are much longer than a quantum; without quanta the last adapters would wait for all of them."""
    simulation = box(
        make_policy(policy),
        num_pages=200,
        max_adapter_pages=num_places,
        max_batch_size=32,
        max_step_tokens=128,
        theta_s=0.05,
        adapters={f"a{i}": 1 for i in range(num_adapters)},
        load_s=load_s,
        costs=Costs(base_s=0.05, merge_s=0.01),
    )
    names = [(f"r{i}-{n}", f"a{i}") for n in range(each) for i in range(num_adapters)]
    simulation.add(*(make_request(name, adapter, max_tokens=60) for name, adapter in names))
    simulation.run()
    bring_s = num_places * load_s + 0.1  # with as many loads as slots; the last one is observed one step late
    rounds = math.ceil(num_adapters / num_places)
    assert max(simulation.first_answer_s(name) for name, _ in names) <= 0.3 + rounds * (9 * bring_s + 0.5)
