"""The engine's side of `vlora bench policy`, on a model of five million parameters."""

from __future__ import annotations

import pytest

from vlora.bench.dummy import small_config
from vlora.bench.journal import Journal
from vlora.bench.policy_engine import Point, WorkClock, average_token_latency_ms, confirm
from vlora.orchestrator import Costs
from vlora.types import RequestOutput, Timings


def test_both_policies_answer_every_arrival_on_the_engine_and_in_the_simulator() -> None:
    costs = Costs(base_s=0.01, token_s=1e-4, lane_token_s=1e-4, lane_s=2e-3, merge_s=0.01)
    (point,) = confirm(
        costs, small_config(), 4, skews=(0.6,), repeats=2, num_requests=12, once=Journal(None, None).once
    )
    assert point.skew == 0.6 and point.requests_s > 0
    assert len(point.baseline_ms) == len(point.ours_ms) == len(point.simulated) == 2
    assert point.ratios == tuple(o / b for o, b in zip(point.ours_ms, point.baseline_ms, strict=True))
    assert all(0.2 < ratio < 5 for ratio in (*point.ratios, *point.simulated)), "both did the same work"


def test_spread_and_error_of_a_point() -> None:
    point = Point(0.6, 1.0, (10.0, 10.0, 10.0), (7.0, 8.0, 9.0), (0.7, 0.8, 0.9), (0.75, 0.85, 0.86))
    assert point.ratio == 0.8
    assert point.spread == pytest.approx(0.2)
    assert point.error == pytest.approx(0.05)


def test_the_clock_skips_idle_time_and_never_goes_back() -> None:
    clock = WorkClock()
    before = clock()
    clock.skip_to(before + 100)
    assert before + 100 <= clock() < before + 101
    clock.skip_to(before)
    assert clock() >= before + 100


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
