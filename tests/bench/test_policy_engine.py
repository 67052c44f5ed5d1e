"""The engine's side of `vlora bench policy`, on a model of five million parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vlora.bench import policy_engine
from vlora.bench.dummy import small_config
from vlora.bench.journal import Journal
from vlora.bench.models import Model
from vlora.bench.policy_engine import Point, WorkClock, average_token_latency_ms, capacity, confirm, drive
from vlora.orchestrator import Costs
from vlora.simulator import Arrival
from vlora.types import RequestOutput, Timings

pytestmark = pytest.mark.slow

SMALL = Model("small", small_config, 256 * 2**20)
CPU = torch.device("cpu")


def test_both_policies_answer_every_arrival_on_the_engine_and_in_the_simulator() -> None:
    costs = Costs(base_s=0.01, token_s=1e-4, lane_s=2e-3, long_lane_s=1e-4, merge_s=0.01, short_lane=8)
    (point,) = confirm(costs, SMALL, 4, CPU, skews=(0.6,), repeats=2, num_requests=12, once=Journal(None, None).once)
    assert point.skew == 0.6 and point.requests_s > 0
    assert len(point.baseline_ms) == len(point.ours_ms) == len(point.floor_ms) == len(point.simulated) == 2
    assert point.ratios == tuple(o / b for o, b in zip(point.ours_ms, point.baseline_ms, strict=True))
    assert all(floor < base for floor, base in zip(point.floor_ms, point.baseline_ms, strict=True))
    assert all(0.2 < ratio < 5 for ratio in (*point.ratios, *point.simulated)), "both did the same work"


def test_capacity_is_a_full_batch_s() -> None:
    """By a clock that counts steps: a request has its place for as many as its answer has tokens, sixteen in the
    middle, whatever order the policy serves those in who wait."""
    worker = policy_engine._Engines(SMALL, 4, CPU).workers["unmerged_only"]
    num_steps = 0
    run = worker.engine.step

    def step() -> tuple[RequestOutput, ...]:
        nonlocal num_steps
        num_steps += 1
        return run()

    worker.engine.step = step  # type: ignore[method-assign]
    worker.clock = WorkClock(lambda: float(num_steps))
    found = capacity(worker, 0.6)
    assert found == pytest.approx(worker.engine.config.max_batch_size / 16, rel=0.1)
    assert not worker.engine.has_work, "those under way were cancelled"


def test_engines_side_by_side_are_at_the_same_place_of_the_same_arrivals() -> None:
    """A machine that is ten times slower for a second is so for each of them: by a clock in which every step takes
    its turn's time, none is ever ahead of another by more than a step, and idle time is skipped by each alone."""
    workers = policy_engine._Engines(SMALL, 4, CPU).workers
    now = 0.0
    elapsed: dict[str, float] = dict.fromkeys(workers, 0.0)
    for name, worker in workers.items():
        worker.clock = WorkClock(lambda: now)
        run = worker.engine.step

        def step(run: Callable[[], tuple[RequestOutput, ...]] = run, name: str = name) -> tuple[RequestOutput, ...]:
            nonlocal now
            behind = min(elapsed.values())
            assert elapsed[name] == behind, "whoever is furthest behind goes on"
            now += 1.0 if 20.0 < now < 40.0 else 0.1
            outputs = run()
            elapsed[name] = workers[name].clock()
            return outputs

        worker.engine.step = step  # type: ignore[method-assign]
    arrivals = [Arrival(0.0, "adapter-0", 16, 40) for _ in range(4)]
    found = drive(workers, arrivals)
    assert all(len(outputs) == 4 for outputs in found.values())
    assert max(elapsed.values()) - min(elapsed.values()) <= 1.0
    assert sum(elapsed.values()) == pytest.approx(now), "a clock stands while another engine runs"


def test_the_twin_on_paper_has_the_same_past() -> None:
    """Whoever begins without a past has to find out first what merging saves."""
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
    arrivals = policy_engine._arrivals(40, 5.0, 0.6, seed=1)
    twin = policy_engine._Paper(costs, "vlora_cost")
    first, second = twin.latency_ms(arrivals), twin.latency_ms(arrivals)
    assert twin._replica.scheduler._cost.costs.merged_s(32, 0) == pytest.approx(0.132, rel=0.02)
    assert second == pytest.approx(first, rel=0.2)


def test_spread_and_error_of_a_point() -> None:
    point = Point(0.6, 1.0, (10.0, 10.0, 10.0), (7.0, 8.0, 9.0), (6.0, 5.0, 4.0), (0.75, 0.85, 0.86))
    assert point.ratio == 0.8
    assert point.floor == 0.5
    assert point.spread == pytest.approx(0.2)
    assert point.error == pytest.approx(0.05)


def test_the_clock_runs_with_its_engine_skips_idle_time_and_never_goes_back() -> None:
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


def test_average_token_latency_is_by_all_tokens() -> None:
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
