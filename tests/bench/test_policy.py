"""`vlora bench policy` on a model of five million parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks import policy
from benchmarks.policy import FLOOR, EnginePoint, measure_policies, retrieval, video
from benchmarks.policy_workers import WorkClock, average_token_latency_ms, capacity, drive
from vlora.bench.dummy import BenchModel, dummy_picture, small_config
from vlora.bench.timing import threads
from vlora.orchestrator import POLICIES, Costs
from vlora.simulator import Arrival
from vlora.types import RequestOutput, Timings

SMALL = BenchModel("small", small_config, 256 * 2**20, all_policies=True)
PAIR = SMALL._replace(all_policies=False)
CPU = torch.device("cpu")
PICTURE = dummy_picture(small_config(), 8)
RETRIEVAL = retrieval(0.6, PICTURE)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


@pytest.mark.exhaustive
@pytest.mark.slow
def test_all_policies_answer_all_arrivals_on_the_engine() -> None:
    costs = Costs(base_s=0.01, token_s=1e-4, lane_s=2e-3, long_lane_s=1e-4, merge_s=0.01, short_lane=8, patch_s=1e-4)

    def once(name: str, make: Callable[[], Any]) -> Any:
        return 5.0 if name.startswith("capacity") else make()

    points = measure_policies(costs, SMALL, 4, CPU, skews=(0.6,), repeats=1, num_requests=6, once=once)
    assert [(point.app, point.skew) for point in points] == [("retrieval", 0.6), ("video", 0.5), ("video", 0.125)]
    for point in points:
        assert point.requests_s > 0 and point.threads == 1
        assert point.latency_ms.keys() == {*POLICIES, FLOOR}
        assert all(len(found) == 1 for found in (*point.latency_ms.values(), point.simulated))
        assert all(0.2 < ratio < 5 for ratio in (*point.ratios(), *point.simulated)), "both did the same work"
        assert point.best in POLICIES and point.best != "cost_based"
        for goal in point.goals(saves=True):
            assert point.app in goal.name


def test_video_is_pictures_for_a_head_at_the_given_rate() -> None:
    arrivals = video(2, PICTURE).make(80, 4.0, 1)
    assert all(each.answer_tokens == 0 and each.images == 2 * (PICTURE.num_patches,) for each in arrivals)
    assert all(each.prompt_tokens == 2 * (PICTURE.num_tokens + 1) + 1 for each in arrivals)
    assert {each.adapter for each in arrivals} == {"adapter-0", "adapter-1"}
    assert arrivals[-1].time_s == pytest.approx(80 / 4.0, rel=0.1)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_capacity_is_that_of_a_full_batch() -> None:
    """With a clock that counts steps: a request keeps its place for as many steps as its answer has tokens, sixteen in
    the median, for any order in which the policy serves waiting requests.
    """
    worker = policy.PolicyEngines(PAIR, 4, CPU, RETRIEVAL).workers["unmerged_only"]
    num_steps = 0
    run = worker.engine.step

    def step() -> tuple[RequestOutput, ...]:
        nonlocal num_steps
        num_steps += 1
        return run()

    worker.engine.step = step  # type: ignore[method-assign]
    worker.clock = WorkClock(lambda: float(num_steps))
    found = capacity(worker, lambda number: [each._replace(images=()) for each in RETRIEVAL.make(number, 1.0, 0)])
    assert found == pytest.approx(worker.engine.config.max_batch_size / 16, rel=0.1)
    assert not worker.engine.has_work, "running requests were cancelled"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_parallel_engines_are_at_the_same_arrivals() -> None:
    """A tenfold slowdown of the machine for a second affects every engine: with a clock in which every step takes its
    turn's time, no engine is ahead of another by more than a step, and each skips its own idle time.
    """
    workers = policy.PolicyEngines(PAIR, 4, CPU, RETRIEVAL).workers
    now = 0.0
    elapsed: dict[str, float] = dict.fromkeys(workers, 0.0)
    for name, worker in workers.items():
        worker.clock = WorkClock(lambda: now)
        run = worker.engine.step

        def step(run: Callable[[], tuple[RequestOutput, ...]] = run, name: str = name) -> tuple[RequestOutput, ...]:
            nonlocal now
            behind = min(elapsed.values())
            assert elapsed[name] == behind, "the engine with the earliest clock continues"
            now += 1.0 if 20.0 < now < 40.0 else 0.1
            outputs = run()
            elapsed[name] = workers[name].clock()
            return outputs

        worker.engine.step = step  # type: ignore[method-assign]
    arrivals = [Arrival(0.0, "adapter-0", 16, 40) for _ in range(4)]
    found = drive(workers, arrivals)
    assert all(len(each.finished) == 4 for each in found.values())
    assert max(elapsed.values()) - min(elapsed.values()) <= 1.0
    assert sum(elapsed.values()) == pytest.approx(now), "a clock stops while another engine runs"


def test_the_simulated_engine_has_the_same_history() -> None:
    """An engine without a history has to learn first what merging saves."""
    costs = Costs(
        base_s=0.1,
        token_s=1e-3,
        lane_s=5e-3,
        long_lane_s=1e-4,
        adapter_s=5e-3,
        long_adapter_s=1e-2,
        merge_s=0.2,
        short_lane=8,
    )
    arrivals = RETRIEVAL.make(40, 5.0, 1)
    twin = policy.SimulatedEngine(costs, "cost_based", RETRIEVAL.make(32, 1e6, 0))
    first, second = twin.latency_ms(arrivals), twin.latency_ms(arrivals)
    assert twin.learned_costs.merged_s(32, 0) == pytest.approx(0.132, rel=0.02)
    assert second == pytest.approx(first, rel=0.2)


def test_ratios_and_goals_of_a_point() -> None:
    latency_ms = {
        "cost_based": (7.0, 8.0, 9.0),
        "unmerged_only": (10.0, 10.0, 10.0),
        "dlora": (8.0, 8.0, 10.0),
        "merged_only": (1.0, 1.0, 1.0),
        FLOOR: (6.0, 5.0, 4.0),
    }
    point = EnginePoint("retrieval", 0.6, 1, 1.0, latency_ms, (0.75, 0.85, 0.86), ("merged_only",))
    assert point.ratio == 0.8 and point.floor == 0.5 and point.error == pytest.approx(0.05)
    assert point.best == "dlora", "a policy that broke the waiting bound does not compete"
    to_baseline, to_best, simulated = point.goals(saves=True)
    assert to_baseline.holds and to_baseline.goal == pytest.approx(1 - 0.2 * 0.5 / 2)
    assert [goal.name for goal in point.goals(saves=False)] == [to_best.name, simulated.name]
    assert to_best.value == 0.9 and to_best.goal == pytest.approx(1.0 + 1.0 - 0.875)
    assert simulated.value == pytest.approx(0.05) and simulated.goal == pytest.approx(0.2)


def test_the_clock_runs_with_its_engine_and_skips_idle_time() -> None:
    now = 5.0
    clock = WorkClock(lambda: now)
    with clock.running():
        now += 2
        assert clock() == 2
    now += 100
    assert clock() == 2, "another engine ran"
    clock.skip_to(10)
    assert clock() == 10
    clock.skip_to(3)
    assert clock() == 10
    assert clock.busy_s == 2


def test_average_token_latency_counts_all_tokens() -> None:
    def output(latency_s: float, prompt: int, answer: int) -> RequestOutput:
        timings = Timings(
            queue_s=0.0,
            ttft_s=0.0,
            latency_s=latency_s,
            num_prompt_tokens=prompt,
            num_completion_tokens=answer,
            num_preemptions=0,
            num_cached_tokens=0,
            steps_by_mode={},
        )
        return RequestOutput(request_id="r", finish_reason="length", timings=timings)

    assert average_token_latency_ms([output(1.0, 5, 5), output(2.0, 10, 10)]) == pytest.approx(100.0)
