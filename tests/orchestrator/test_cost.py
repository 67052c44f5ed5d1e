"""The cost model learns a machine from its steps, follows it when it changes, and never promises less than nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atmm import selection
from vlora.orchestrator import CostModel, Costs, StepSize
from vlora.orchestrator.cost import NARROW

Step = tuple[int, int, int, int]


def seconds(tokens: int, lane_tokens: int, context: int, adapters: int, slow: float = 1.0) -> float:
    lane_s, adapter_s = (0.0003, 0.012) if tokens > NARROW else (0.002, 0.004)
    return slow * (0.05 + 0.0008 * tokens + lane_s * lane_tokens + 2e-6 * context + adapter_s * adapters)


def some_step(draws: random.Random) -> Step:
    """A few requests decode, or one or two of them bring prompts."""
    requests, each = draws.randint(1, 16), draws.choice([0, 1, 2])
    tokens = requests + (draws.choice([10, draws.randint(50, 512)]) if draws.random() < 0.4 else 0)
    adapters = draws.randint(1, requests) + each - 1 if each else 0
    return tokens, each * tokens, draws.randint(0, 16000), adapters


def learn(cost: CostModel, step: Step, seconds: float) -> None:
    cost.observe_step(StepSize(*step), seconds)


def relative_error(cost: CostModel, step: Step, slow: float = 1.0) -> float:
    return abs(cost.costs.step_s(*step) / seconds(*step, slow) - 1)


def test_nothing_is_assumed_before_the_first_sample() -> None:
    cost = CostModel()
    assert cost.costs.step_s(512, 1024, 10_000, 4) == 0.0
    assert cost.switch_s == 0.0


def test_one_sample_is_enough_to_expect_the_same_again() -> None:
    cost = CostModel()
    learn(cost, (16, 16, 4000, 8), 0.2)
    assert abs(cost.costs.step_s(16, 16, 4000, 8) - 0.2) < 0.01


def test_what_cannot_be_told_apart_is_put_down_to_lanes_until_a_merged_step_tells() -> None:
    cost = CostModel()
    unmerged, merged = (512, 512, 0, 1), (512, 0, 0, 0)
    for _ in range(50):
        learn(cost, unmerged, seconds(*unmerged))
    assert cost.costs.step_s(*unmerged) > 2 * cost.costs.step_s(*merged), "so that merging is tried"
    for _ in range(20):
        learn(cost, merged, seconds(*merged))
    assert relative_error(cost, merged) < 0.05
    assert relative_error(cost, unmerged) < 0.1


def test_an_adapter_that_many_want_is_read_once() -> None:
    """Sixteen requests decode with as many adapters, or with one, or merged: three prices, each learned."""
    cost = CostModel()
    steps = [(16, 16, 0, 16), (16, 16, 0, 1), (16, 0, 0, 0), (300, 300, 0, 2)]
    for _ in range(100):
        for step in steps:
            learn(cost, step, seconds(*step))
    assert max(relative_error(cost, step) for step in steps) < 0.02
    apart, together = (cost.costs.step_s(*step) for step in steps[:2])
    assert abs(apart - together - 15 * 0.004) < 0.005


def test_lanes_and_adapters_have_other_prices_in_wide_steps() -> None:
    """A prompt that joins those who decode makes their adapters dear, and its lanes cheap: all four prices are learned,
    and expected of steps that were never seen."""
    draws = random.Random(3)
    cost = CostModel()
    for _ in range(300):
        requests = draws.randint(1, 16)
        tokens = requests + draws.choice([0, 0, 0, 12, 40, 300])
        each = draws.choice([0, 1, 1, 2])
        step = (tokens, each * tokens, 0, draws.randint(1, requests) + each - 1 if each else 0)
        learn(cost, step, seconds(*step) * draws.gauss(1, 0.02))
    assert cost.costs.lane_prices(NARROW) == pytest.approx((0.002, 0.004), rel=0.15)
    assert cost.costs.lane_prices(NARROW + 1) == pytest.approx((0.0003, 0.012), rel=0.15)
    for step in ((32, 32, 0, 12), (33, 33, 0, 12), (100, 100, 0, 9), (512, 512, 0, 4)):
        assert relative_error(cost, step) < 0.05


def test_several_steps_at_once_are_each_as_wide_as_in_the_mean() -> None:
    costs = Costs(base_s=0.1, token_s=0.001, lane_s=0.003, wide_lane_s=0.001, adapter_s=0.004, wide_adapter_s=0.008)
    narrow, wide = costs.step_s(32, 32, 0, 3), costs.step_s(40, 40, 0, 3)
    assert costs.step_s(96, 96, 0, 9, num_steps=3) == pytest.approx(3 * narrow)
    assert costs.step_s(120, 120, 0, 9, num_steps=3) == pytest.approx(3 * wide)


def test_narrow_is_what_the_compiled_kernels_read_in_place() -> None:
    assert NARROW == selection._COMPILED_TOKENS


def test_a_linear_machine_is_learned_through_noise() -> None:
    draws = random.Random(0)
    cost = CostModel()
    for _ in range(200):
        step = some_step(draws)
        learn(cost, step, seconds(*step) * draws.gauss(1, 0.05))
    assert max(relative_error(cost, some_step(draws)) for _ in range(100)) < 0.1


def test_a_machine_that_slows_down_is_followed_within_a_hundred_steps() -> None:
    draws = random.Random(1)
    cost = CostModel()
    for _ in range(300):
        step = some_step(draws)
        learn(cost, step, seconds(*step))
    assert relative_error(cost, (8, 8, 8000, 4), slow=2) > 0.4
    for _ in range(100):
        step = some_step(draws)
        learn(cost, step, seconds(*step, slow=2))
    assert relative_error(cost, (8, 8, 8000, 4), slow=2) < 0.15
    assert relative_error(cost, (512, 512, 0, 3), slow=2) < 0.15


def test_long_decoding_does_not_make_it_forget_that_prompts_are_dear() -> None:
    draws = random.Random(2)
    cost = CostModel()
    for _ in range(100):
        step = some_step(draws)
        learn(cost, step, seconds(*step))
    for i in range(5000):
        step = (16, 16, 16 * i, 8)
        learn(cost, step, seconds(*step))
    assert relative_error(cost, (16, 16, 80_000, 8)) < 0.01
    assert relative_error(cost, (512, 512, 0, 3)) < 0.5


@settings(max_examples=60)
@given(
    samples=st.lists(
        st.tuples(
            st.integers(1, 600),
            st.integers(0, 1200),
            st.integers(0, 10**6),
            st.integers(0, 64),
            st.floats(1e-5, 100),
        ),
        max_size=40,
    ),
    asked=st.tuples(
        st.integers(0, 600).filter(lambda tokens: tokens != NARROW),
        st.integers(0, 1200),
        st.integers(0, 10**6),
        st.integers(0, 64),
    ),
)
def test_estimates_are_never_negative_and_never_fall_as_steps_grow(
    samples: list[tuple[int, int, int, int, float]], asked: Step
) -> None:
    """As long as they stay narrow."""
    cost = CostModel()
    for sample in samples:
        learn(cost, sample[:4], sample[4])
        estimate = cost.costs.step_s(*asked)
        assert 0 <= estimate < 1e5
        for place in range(4):
            assert estimate <= cost.costs.step_s(*(count + (i == place) for i, count in enumerate(asked)))


def test_switches_are_averaged_with_the_newest_counting_most() -> None:
    cost = CostModel()
    cost.observe_switch(0.1)
    assert cost.switch_s == 0.1
    for _ in range(20):
        cost.observe_switch(0.3)
    assert 0.29 < cost.switch_s < 0.3
