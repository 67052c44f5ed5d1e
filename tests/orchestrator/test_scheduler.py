"""Scheduler behavior, one aspect per test: budgets, ends of requests, preemption, counters."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence

import msgspec
import pytest

from tests.orchestrator.checked_replica import CheckedReplica, CheckedReplicaConfig
from tests.orchestrator.sample_requests import EOS, make_request, sampled_token
from vlora.errors import PromptTooLong
from vlora.orchestrator import Candidate, CostModel, Costs, Decision, PolicyState, StepSize
from vlora.orchestrator.request_state import TrackedRequest
from vlora.types import Batch, ErrorValue, MemoryView, Mode, RequestOutput

NOTHING = MemoryView(resident=frozenset(), mergeable=frozenset())
PLAIN = Costs(base_s=1.0, merge_s=0.5, patch_s=0.0005)


def box(policy: object = None, failing: dict[str, int] | None = None, **settings: object) -> CheckedReplica:
    """One second per step, one page per block of four tokens."""
    machine = CheckedReplicaConfig(**{"adapters": {"a": 2, "b": 2}, "costs": PLAIN, "theta_s": 10.0, **settings})  # type: ignore[arg-type]
    return CheckedReplica(machine, policy=policy, failing=failing)  # type: ignore[arg-type]


def shares(batch: Batch | None) -> dict[str, tuple[int, int]]:
    """The tokens that run, by request."""
    assert batch is not None
    return {item.request_id: (item.start, item.start + item.num_tokens) for item in batch.items}


def last(simulation: CheckedReplica, request_id: str) -> RequestOutput:
    return simulation.outputs[request_id][-1]


class Script:
    """A policy that selects given requests per step, unmerged; after its last line, all in order of arrival."""

    def __init__(self, *orders: str) -> None:
        self.orders = [tuple(order) for order in orders]

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        order = self.orders.pop(0) if self.orders else tuple(c.request_id for c in ready)
        return Decision(Mode.UNMERGED, None, order[: state.max_batch_size])


# -- token budget -----------------------------------------------------------------------------------------------------


def test_a_long_prompt_runs_in_chunks_and_answers_with_the_last() -> None:
    simulation = box(max_step_tokens=8)
    simulation.add(make_request("x", prompt=20, max_tokens=2))
    batches = [simulation.step() for _ in range(4)]
    assert [shares(batch)["x"] for batch in batches] == [(0, 8), (8, 16), (16, 20), (20, 21)]
    assert [batch.items[0].answers for batch in batches if batch] == [False, False, True, True]
    assert simulation.outputs["x"][0].token_ids == (sampled_token("x", 0),)
    assert last(simulation, "x").finish_reason == "length"


def test_decoding_requests_get_their_token_before_any_prefill() -> None:
    simulation = box(Script("xy", "zxy"), max_step_tokens=10)
    simulation.add(make_request("x", prompt=3), make_request("y", prompt=4), make_request("z", prompt=30))
    simulation.step()
    assert shares(simulation.step()) == {"z": (0, 8), "x": (3, 4), "y": (4, 5)}


def test_prefill_chunks_follow_the_order_of_the_policy() -> None:
    simulation = box(Script("zxy"), max_step_tokens=10)
    simulation.add(*(make_request(name, prompt=7) for name in "xyz"))
    assert shares(simulation.step()) == {"z": (0, 7), "x": (0, 3)}


def test_a_starving_request_runs_beside_a_prompt_that_fills_the_step() -> None:
    simulation = box(Script("x", "x", "x", "xy"), max_step_tokens=10, theta_s=2.5)
    simulation.add(make_request("x", prompt=60), make_request("y", prompt=5))
    for _ in range(3):
        assert "y" not in shares(simulation.step())
    assert shares(simulation.step()) == {"x": (30, 39), "y": (0, 1)}


# -- ends of requests -------------------------------------------------------------------------------------------------


def test_a_head_answers_in_one_pass_over_the_prompt() -> None:
    simulation = box()
    simulation.add(make_request("h", "a", head="kind", prompt=9, max_tokens=50))
    simulation.run()
    (output,) = simulation.outputs["h"]
    assert output.finish_reason == "head" and output.head is not None and output.head.label == "yes"
    assert len(simulation.log) == 1


def test_an_end_token_stops_a_request_unless_it_ignores_it() -> None:
    name = next(f"r{i}" for i in range(1000) if sampled_token(f"r{i}", 1) == EOS)
    for ignore_eos, reason, number in ((False, "stop", 2), (True, "length", 5)):
        simulation = box()
        simulation.add(make_request(name, max_tokens=5, ignore_eos=ignore_eos))
        simulation.run()
        assert last(simulation, name).finish_reason == reason
        assert sum(len(output.token_ids) for output in simulation.outputs[name]) == number


def test_an_error_fails_only_its_own_request() -> None:
    simulation = box(failing={"bad": 2})
    simulation.add(make_request("good"), make_request("bad"))
    simulation.run()
    assert last(simulation, "bad").error == ErrorValue("bad_image", "this one fails alone")
    assert last(simulation, "good").finish_reason == "length"
    stats = simulation.scheduler.stats("simulated")
    assert (stats.num_finished, stats.num_failed, stats.num_cancelled) == (1, 1, 0)
    assert stats.highest_credit_s == 0
    simulation.add(make_request("left"))
    assert simulation.scheduler.stats("simulated").highest_credit_s > 0
    simulation.scheduler.cancel("left")
    stats = simulation.scheduler.stats("simulated")
    assert (stats.num_finished, stats.num_failed, stats.num_cancelled) == (1, 1, 1)


def test_cancelling_frees_memory_and_returns_one_output() -> None:
    simulation = box()
    simulation.add(make_request("x", "a", prompt=9))
    simulation.step()
    assert simulation.block_manager.holders == {"x"}
    output = simulation.scheduler.cancel("x")
    assert output is not None and output.finish_reason == "cancelled"
    assert output.error is not None and output.error.code == "aborted"
    assert simulation.block_manager.holders == frozenset() and not simulation.scheduler.has_work
    assert simulation.scheduler.cancel("x") is None
    assert simulation.scheduler.fail("x", ErrorValue("error", "late")) is None


def test_cancelling_during_a_step_leaves_no_state() -> None:
    simulation = box()
    simulation.add(make_request("x"), make_request("y"))
    batch = simulation.scheduler.schedule(NOTHING)
    assert batch is not None
    result = simulation.machine.run(batch)
    assert simulation.scheduler.cancel("x") is not None
    outputs = simulation.scheduler.record(batch, result)
    assert [output.request_id for output in outputs] == ["y"]
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
    view = MemoryView(resident=frozenset("a"), mergeable=frozenset())
    assert shares(simulation.scheduler.schedule(view)) == {"h": (0, 6)}


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


def test_a_request_that_waits_past_its_deadline_fails() -> None:
    simulation = box(Script("x", "x", "x"))
    simulation.add(make_request("x", max_tokens=9), make_request("late", max_latency_s=2.0))
    for _ in range(3):
        simulation.step()
        assert not simulation.outputs["late"], "two seconds pass only in the third step"
    simulation.step()
    output = last(simulation, "late")
    assert output.finish_reason == "error" and output.error is not None and output.error.code == "deadline_missed"
    assert output.timings is not None and output.timings.latency_s == output.timings.queue_s == 3.0


def test_a_late_answer_is_an_error() -> None:
    simulation = box()
    simulation.add(make_request("text", max_tokens=3, max_latency_s=2.5))
    simulation.run()
    output = last(simulation, "text")
    assert output.error is not None and output.error.code == "deadline_missed"
    assert output.token_ids == (sampled_token("text", 2),), "the tokens are returned, but the request did not finish"
    for bound, reason in ((0.9, "error"), (1.5, "head")):
        simulation = box()
        simulation.add(make_request("head", "a", head="kind", max_latency_s=bound))
        simulation.run()
        output = last(simulation, "head")
        assert output.finish_reason == reason and (output.head is None) == (reason == "error")


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
    assert last(simulation, "fits").finish_reason == "length"
    assert last(simulation, "head").finish_reason == "head"


# -- adapters ---------------------------------------------------------------------------------------------------------


def test_only_requests_with_a_resident_adapter_run() -> None:
    simulation = box()
    simulation.scheduler.add(make_request("x", "a"))
    simulation.scheduler.add(make_request("base"))
    batch = simulation.scheduler.schedule(NOTHING)
    assert list(shares(batch)) == ["base"]
    assert simulation.scheduler.demand.adapters_by_credit() == ("a",)
    assert simulation.scheduler.demand.adapters_in_use() == frozenset()


def test_adapters_are_ordered_by_the_credit_of_their_requests() -> None:
    simulation = box()
    simulation.scheduler.add(make_request("x", "a"))
    simulation.scheduler.admit(frozenset())
    simulation.clock.now = 1.0
    simulation.scheduler.add(make_request("y", "b"))
    simulation.scheduler.admit(frozenset())
    simulation.clock.now = 2.0
    assert simulation.scheduler.demand.adapters_by_credit() == ("a", "b")
    view = MemoryView(resident=frozenset("a"), mergeable=frozenset())
    batch = simulation.scheduler.schedule(view)
    assert batch is not None
    simulation.machine.add(make_request("x", "a"))
    simulation.scheduler.record(batch, simulation.machine.run(batch))
    assert simulation.scheduler.demand.adapters_by_credit() == ("b", "a"), "x has just run"
    assert simulation.scheduler.demand.adapters_in_use() == {"a"}


@pytest.mark.parametrize("on_its_way", [True, False])
def test_running_requests_keep_their_adapter_during_another_load(on_its_way: bool) -> None:
    """Evicting adapters of running requests helps a request without room, but does not speed up a slow file read."""
    simulation = box()
    simulation.add(make_request("runs", "a", max_tokens=50))
    simulation.scheduler.add(make_request("waits", "b"))
    simulation.scheduler.admit(frozenset("a"))
    loading = frozenset("b") if on_its_way else frozenset[str]()
    for _ in range(2):
        simulation.clock.now += 5.0
        batch = simulation.scheduler.schedule(
            MemoryView(resident=frozenset("a"), mergeable=frozenset(), loading=loading)
        )
        assert batch is not None and list(shares(batch)) == ["runs"]
        simulation.scheduler.record(batch, simulation.machine.run(batch))
    assert simulation.scheduler.demand.adapters_in_use() == (frozenset("a") if on_its_way else frozenset())


def test_an_evicted_adapter_does_not_count_as_merged() -> None:
    seen: list[str | None] = []

    class Spy(Script):
        def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
            seen.append(state.merged_adapter)
            merged = "a" if "a" in state.mergeable else None
            mode = Mode.UNMERGED if merged is None else Mode.MIXED
            return Decision(mode, merged, tuple(c.request_id for c in ready))

    simulation = box(Spy())
    simulation.add(make_request("x"), make_request("y"))
    for resident in (frozenset("a"), frozenset("a"), frozenset[str]()):
        batch = simulation.scheduler.schedule(MemoryView(resident=resident, mergeable=resident))
        assert batch is not None
        simulation.scheduler.record(batch, simulation.machine.run(batch))
    assert seen == [None, "a", None]


def test_merged_mode_with_other_adapters_is_rejected() -> None:
    class Wrong(Script):
        def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
            return Decision(Mode.MERGED, "a", tuple(c.request_id for c in ready))

    simulation = box(Wrong())
    simulation.add(make_request("x", "a"), make_request("y", "b"))
    with pytest.raises(AssertionError, match="merged mode serves one adapter"):
        simulation.step()


# -- preemption -------------------------------------------------------------------------------------------------------


def tight(policy: object, num_blocks: int, **settings: object) -> CheckedReplica:
    """No adapters; `num_blocks` blocks of four tokens. For tests with the fixture `no_kv_admission`."""
    return box(policy, num_pages=num_blocks, max_adapter_pages=0, **settings)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_kv_admission")
def test_the_newest_paused_request_is_preempted_first() -> None:
    simulation = tight(Script("wxy", "z"), 7)
    simulation.add(make_request("z", prompt=8), *(make_request(name, prompt=7) for name in "wxy"))
    simulation.step()
    batch = simulation.step()
    assert batch is not None and batch.preempted == ("y",)
    assert simulation.block_manager.holders == {"w", "x", "z"}


@pytest.mark.usefixtures("no_kv_admission")
def test_selected_requests_are_preempted_if_none_is_paused() -> None:
    simulation = tight(Script("wxy", "wxy"), 3)
    simulation.add(*(make_request(name, prompt=4, max_tokens=3) for name in "wxy"))
    simulation.step()
    batch = simulation.step()
    assert batch is not None and batch.preempted == ("y",), "w takes y's block; none is left for x"
    assert list(shares(batch)) == ["w"]
    simulation.run()
    assert all(last(simulation, name).finish_reason == "length" for name in "wxy")


@pytest.mark.usefixtures("no_kv_admission")
def test_a_paused_request_is_preempted_before_a_newer_selected_one() -> None:
    simulation = tight(Script("wxy", "xy"), 3)
    simulation.add(*(make_request(name, prompt=4, max_tokens=3) for name in "wxy"))
    simulation.step()
    batch = simulation.step()
    assert batch is not None and batch.preempted == ("w",)
    assert simulation.block_manager.holders == {"x", "y"}, "y does not run in this step, but keeps its block"


@pytest.mark.usefixtures("no_kv_admission")
def test_no_request_is_preempted_without_benefit() -> None:
    simulation = tight(Script("wx", "wyx"), 8)
    simulation.add(make_request("y", prompt=20), make_request("w", prompt=14), make_request("x", prompt=3))
    simulation.step()
    batch = simulation.step()
    assert batch is not None and batch.preempted == ()
    assert list(shares(batch)) == ["w", "x"], "y would not fit even with x's block"


@pytest.mark.usefixtures("no_kv_admission")
def test_a_preempted_request_keeps_its_tokens_and_recomputes_its_kv() -> None:
    simulation = tight(Script("x", "x", "x", "y", "x"), 4)
    simulation.add(make_request("y", prompt=9, max_tokens=1), make_request("x", prompt=6, max_tokens=5))
    for _ in range(3):
        simulation.step()
    batch = simulation.step()
    assert batch is not None and batch.preempted == ("x",)
    assert shares(simulation.step()) == {"x": (0, 9)}, "six prompt tokens and three sampled ones"
    simulation.run()
    tokens = [token for output in simulation.outputs["x"] for token in output.token_ids]
    assert tokens == [sampled_token("x", place) for place in range(5)]
    timings = last(simulation, "x").timings
    assert timings is not None and timings.num_preemptions == 1 and timings.num_completion_tokens == 5
    stats = simulation.scheduler.stats("simulated")
    assert stats.num_needed_tokens == 9 + 6 + 4 and stats.num_step_tokens == stats.num_needed_tokens + 8


@pytest.mark.usefixtures("no_kv_admission")
def test_only_the_oldest_request_without_kv_preempts_others() -> None:
    for taker, preempted in (("v", ()), ("z", ("x",))):
        simulation = tight(Script("x", taker + "x"), 3)
        simulation.add(*(make_request(name, prompt=9, max_tokens=3) for name in "zxv"))
        simulation.step()
        batch = simulation.step()
        assert batch is not None and batch.preempted == preempted
        assert list(shares(batch)) == (["z"] if preempted else ["x"])
        simulation.run()
        assert all(last(simulation, name).finish_reason == "length" for name in "xzv")


def test_preempted_requests_enter_before_new_ones() -> None:
    simulation = box(num_pages=4, max_adapter_pages=0)
    for _ in range(1000):
        simulation.scheduler.queue.observe_answer_length(1, 16)
    simulation.add(*(make_request(name, prompt=4, max_tokens=9) for name in "wxyz"), make_request("late", prompt=1))
    simulation.step()
    assert simulation.block_manager.holders == {"w", "x", "y", "z"}, "answers are expected to be one token long"
    simulation.run()
    starts = [item.request_id for step in simulation.log for item in step.batch.items if item.start == 0]
    assert starts[:4] == ["w", "x", "y", "z"] and starts[-1] == "late"
    assert sorted(starts[4:-1]) == ["x", "y", "z"], "each was preempted once and entered before the new request"
    assert all(last(simulation, name).finish_reason == "length" for name in ("w", "x", "y", "z", "late"))


@pytest.mark.usefixtures("no_kv_admission")
def test_the_oldest_ready_request_preempts_an_older_protected_one_that_is_not_ready() -> None:
    simulation = tight(Script("x", "y", "x", "y"), 3, max_step_tokens=8)
    simulation.add(make_request("x", "a", prompt=10, max_tokens=2), make_request("y", prompt=10, max_tokens=2))
    for resident, preempted in (("a", ""), ("", "x"), ("a", "y"), ("", "x")):  # x cannot run without its adapter
        batch = simulation.scheduler.schedule(MemoryView(resident=frozenset(resident), mergeable=frozenset()))
        assert batch is not None and batch.preempted == tuple(preempted)
        simulation.scheduler.record(batch, simulation.machine.run(batch))


@pytest.mark.usefixtures("no_kv_admission")
def test_the_oldest_runs_if_no_selected_request_gets_blocks() -> None:
    simulation = tight(Script(*"xxxxxxy"), 3)
    simulation.add(make_request("x", "a", prompt=4, max_tokens=8), make_request("y", prompt=4, max_tokens=8))
    view = MemoryView(resident=frozenset("a"), mergeable=frozenset())
    modes = []
    for _ in range(7):
        batch = simulation.scheduler.schedule(view)
        assert batch is not None
        simulation.scheduler.record(batch, simulation.machine.run(batch))
        modes.append((batch.mode, "".join(shares(batch))))
    assert modes[6] == (Mode.UNMERGED, "x"), "y was selected, but no block is available to it"


# -- counters ---------------------------------------------------------------------------------------------------------


def test_a_request_counts_once_per_mode() -> None:
    simulation = box()
    simulation.add(make_request("x", "a", max_tokens=3), make_request("y", "a", max_tokens=3))
    simulation.run()
    simulation.add(make_request("u", "a", max_tokens=2), make_request("v", "b", max_tokens=2))
    simulation.run()
    stats = simulation.scheduler.stats("simulated")
    assert stats.steps_by_mode == {"merged": 3, "unmerged": 2}
    assert stats.requests_by_mode == {"merged": 2, "unmerged": 2}
    assert stats.num_switches == 2 and stats.switch_s == 0.5, "one switch to a; restoring W0 is free"
    timings = last(simulation, "x").timings
    assert timings is not None and timings.steps_by_mode == {"merged": 3}


def test_timings_start_at_arrival() -> None:
    simulation = box(Script("x", "y"))
    simulation.add(make_request("x", max_tokens=9), make_request("y", prompt=5, max_tokens=2))
    for _ in range(3):
        simulation.step()
    timings = last(simulation, "y").timings
    assert timings is not None
    assert (timings.queue_s, timings.ttft_s, timings.latency_s) == (1.0, 2.0, 3.0)
    assert (timings.num_prompt_tokens, timings.num_completion_tokens) == (5, 2)


def test_waiting_and_running_requests_are_counted() -> None:
    simulation = box(max_batch_size=2)
    simulation.add(*(make_request(f"r{i}") for i in range(5)))
    simulation.step()
    stats = simulation.scheduler.stats("simulated")
    assert (stats.num_waiting, stats.num_running) == (3, 2)
    assert stats.total_blocks - stats.free_blocks == 2


class Mixed:
    """Runs all requests, with adapter a merged."""

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        return Decision(Mode.MIXED, "a", tuple(c.request_id for c in ready))


def test_credit_is_wait_plus_next_step_plus_switch() -> None:
    simulation = box(Mixed())
    simulation.add(make_request("w", "a", max_tokens=5))
    simulation.step()
    assert simulation.policy.credits == {"w": 0.0}, "no costs are known yet"
    simulation.run()
    for name, adapter in (("x", "a"), ("y", "b"), ("z", None)):
        simulation.add(make_request(name, adapter, max_tokens=50))
    for _ in range(6):
        simulation.step()
    credits = simulation.policy.credits
    assert credits["x"] == pytest.approx(1.0, rel=0.02), "it has just run, and steps take a second"
    assert credits["y"] - credits["x"] == pytest.approx(0.5, abs=0.02), "a merge takes half a second"
    assert credits["z"] - credits["x"] == pytest.approx(0.5, abs=0.02), "W0 is not in place either"
    simulation.clock.now += 3.0
    simulation.step()
    assert simulation.policy.credits["x"] == pytest.approx(4.0, rel=0.02)


def test_the_cost_model_observes_the_contents_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = box(Mixed())
    samples: list[tuple[StepSize, float]] = []
    monkeypatch.setattr(CostModel, "observe_step", lambda self, *sample: samples.append(sample))
    simulation.add(
        make_request("x", "a", prompt=3), make_request("y", "b", prompt=5), make_request("z", None, prompt=2)
    )
    simulation.step()
    simulation.step()
    # Tokens of the merged adapter have no lane, those of the other adapter their own; all others share the branch.
    assert samples == [(StepSize(10, (5, 5 + 2), 0), 1.0), (StepSize(3, (1, 1 + 1), 10), 1.0)]


def test_only_merges_count_towards_the_switch_cost() -> None:
    simulation = box()
    simulation.add(make_request("x", "a", max_tokens=2))
    simulation.run()
    simulation.add(make_request("z", None, max_tokens=2))
    simulation.run()
    assert simulation.scheduler.stats("simulated").num_switches == 2
    assert simulation.scheduler.costs.merge_s == 0.5, "restoring W0 was free and is not part of the average"


def test_theta_is_at_least_two_of_the_longest_steps() -> None:
    simulation = box(theta_s=0.001)
    simulation.add(make_request("x", "a", max_tokens=20), make_request("y", "b", max_tokens=20))
    for _ in range(10):
        simulation.step()
    assert simulation.policy.theta_s == pytest.approx(2.0, rel=0.01), "steps take one second"


@pytest.mark.parametrize("num_requests", [4, 16])
def test_theta_grows_with_the_number_of_ready_requests(num_requests: int) -> None:
    """Steps of 0.2 s, theta 0.1 s: a request that only waits for its turn does not starve."""
    simulation = box(theta_s=0.1, max_batch_size=4, costs=Costs(base_s=0.2))
    simulation.add(*(make_request(f"r{i}", "ab"[i % 2], max_tokens=50) for i in range(num_requests)))
    num_starving = num_ready = 0
    for step in range(100):
        simulation.step()
        if step > 1 and simulation.policy.credits:  # step times are unknown before a step of each kind
            theta_s, credits = simulation.policy.theta_s, simulation.policy.credits.values()
            assert theta_s >= (1 + math.ceil(len(credits) / 4)) * 0.2 * 0.99
            num_starving += sum(credit > theta_s for credit in credits)
            num_ready += len(credits)
    assert num_starving <= 0.3 * num_ready


# -- adapters and KV share one memory ---------------------------------------------------------------------------------


def test_unneeded_adapters_are_evicted_before_requests_are_preempted() -> None:
    """Twelve pages of one block each, half of them occupied by adapters, one of which is needed."""
    machine = CheckedReplicaConfig(
        num_pages=12, block_size=4, max_adapter_pages=6, adapters={"cold": 2, "warm": 2, "used": 2}, theta_s=10.0
    )
    simulation = CheckedReplica(machine)
    for name, pages in machine.adapters.items():
        simulation.adapter_cache.allocate(name, pages)
    simulation.add(
        make_request("r1", "used", prompt=8, max_tokens=8), make_request("r2", "used", prompt=8, max_tokens=8)
    )
    simulation.run()
    assert simulation.scheduler.stats("m").num_preemptions == 0
    assert simulation.adapter_cache.resident == {"warm", "used"}, "only the least recently used one"


def test_needed_and_merged_adapters_are_not_evicted() -> None:
    machine = CheckedReplicaConfig(
        num_pages=8, block_size=4, max_adapter_pages=4, adapters={"a": 2, "b": 2}, theta_s=10.0
    )
    simulation = CheckedReplica(machine)
    for name, pages in machine.adapters.items():
        simulation.adapter_cache.allocate(name, pages)
    simulation.add(make_request("r1", "a", prompt=8, max_tokens=8), make_request("r2", "b", prompt=8, max_tokens=8))
    simulation.run()
    assert simulation.scheduler.stats("m").num_preemptions == 0
    assert [len(step.batch.items) for step in simulation.log] == [1] * 16, "one after the other"
    assert simulation.adapter_cache.resident == {"a", "b"}
    simulation.adapter_cache.evict_for_blocks(8, kept={"a"})
    assert simulation.adapter_cache.resident == {"a"}
