"""The cost model learns a machine from its steps, follows changes, and never predicts negative times."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from vlora.orchestrator.cost_model import CostModel, Costs, StepSize, TokenThresholds, measured_s
from vlora.orchestrator.encoder_budget import encode_budget
from vlora.orchestrator.latency_promise import LatencyPromise, PiecePrices
from vlora.split.batching import Call, CallQueue
from vlora.training.loop import Piece
from vlora.types import Batch, BatchItem, Mode

TRUE = Costs(
    base_s=0.05,
    token_s=0.0008,
    lane_s=0.002,
    long_lane_s=0.0003,
    context_token_s=2e-6,
    adapter_s=0.004,
    long_adapter_s=0.017,
    short_lane=8,
)


def step(tokens: int, lanes: tuple[int, ...] = (), context: int = 0) -> StepSize:
    return StepSize(tokens, lanes, context)


def some_step(draws: random.Random) -> StepSize:
    """Decoding requests, possibly with one prompt; unmerged, mixed or merged."""
    requests, num_adapters = draws.randint(1, 16), draws.randint(1, 16)
    each = [1] * requests
    if draws.random() < 0.4:
        each[0] = draws.choice([10, draws.randint(50, 512)])
    names = [f"a{draws.randrange(num_adapters)}" for _ in each]
    merged = draws.choice([None, "a0"])
    if draws.random() < 0.3:
        names, merged = ["a0"] * requests, "a0"
    return StepSize.holding(zip(names, each, strict=True), merged, draws.randint(0, 16000))


def learn(cost: CostModel, size: StepSize, slow: float = 1.0) -> None:
    cost.observe_step(size, slow * TRUE.step_s(size))


def relative_error(cost: CostModel, size: StepSize, slow: float = 1.0) -> float:
    return abs(cost.costs.step_s(size) / (slow * TRUE.step_s(size)) - 1)


def batch(merged: str | None, *items: tuple[str | None, int]) -> Batch:
    placed = [BatchItem(f"r{i}", adapter, 100, tokens, (0,), True) for i, (adapter, tokens) in enumerate(items)]
    return Batch(Mode.UNMERGED if merged is None else Mode.MIXED, merged, tuple(placed), ())


@pytest.mark.parametrize(
    ("merged", "lanes"),
    [(None, (3, 31)), ("b", (3, 7)), ("c", (3, 31, 38))],  # with b merged: a's, and the branch of a and the base
)
def test_an_adapter_has_one_lane_and_all_others_share_the_branch(merged: str | None, lanes: tuple[int, ...]) -> None:
    items = (("a", 1), ("b", 30), (None, 4), ("a", 2), ("b", 1))
    mode = Mode.UNMERGED if merged is None else Mode.MIXED
    assert StepSize.of(batch(merged, *items)) == StepSize(38, lanes, 500, mode=mode)
    assert StepSize.of(batch(None, (None, 5))) == StepSize(5, (), 100)
    assert StepSize.of(batch("a", ("a", 5))) == StepSize(5, (), 100, mode=Mode.MERGED)


def test_the_cost_of_a_lane_depends_on_its_length() -> None:
    short, long, longer = (TRUE.lanes_s(length) for length in (8, 9, 10))
    assert short == pytest.approx(0.004 + 8 * 0.002)
    assert (long, longer - long) == (pytest.approx(0.017 + 9 * 0.0003), pytest.approx(0.0003))
    beside = TRUE.step_s(step(48, (1, 1, 1, 45)))
    assert beside == pytest.approx(TRUE.step_s(step(45, (45,))) + 3 * (0.0008 + 0.004 + 0.002)), "whatever it is beside"
    assert TRUE.lanes_s(24, 3) == pytest.approx(3 * TRUE.lanes_s(8)), "several alike"
    assert TRUE.lanes_s(27, 3) == pytest.approx(3 * TRUE.lanes_s(9))
    assert TRUE.lanes_s(0, 0) == 0
    assert TRUE._replace(short_lane=0).lanes_s(1) == pytest.approx(0.0173), "none is short where all are computed alike"
    assert step(9, (1, 8)).features(TokenThresholds())[3:] == (0, 9, 0, 0, 2, 0, 0, 0, 0)


THIN = Costs(base_s=0.07, token_s=0.006, thin_token_s=0.002, hidden_tokens=8, thin_tokens=32)


@pytest.mark.parametrize(("tokens", "thin", "wide"), [(1, 1, 0), (8, 8, 0), (32, 32, 24), (512, 32, 504)])
def test_tokens_cost_by_the_width_of_the_step(tokens: int, thin: int, wide: int) -> None:
    assert THIN.merged_s(tokens, 0) == pytest.approx(0.07 + thin * 0.002 + wide * 0.006)
    assert THIN.merged_s(4 * tokens, 0, 4) == pytest.approx(4 * THIN.merged_s(tokens, 0)), "several steps alike"
    assert Costs(base_s=0.07, token_s=0.006).merged_s(tokens, 0) == pytest.approx(0.07 + tokens * 0.006)


def test_nothing_is_assumed_before_the_first_sample_which_predicts_the_same_step() -> None:
    cost, size = CostModel(TRUE.thresholds), step(16, (2,) * 8, 4000)
    assert cost.costs.step_s(size) == cost.switch_s == 0.0
    cost.observe_step(size, 0.2)
    cost.observe_switch(0.1)
    assert abs(cost.costs.step_s(size) - 0.2) < 0.01 and cost.switch_s == 0.1
    for _ in range(20):
        cost.observe_switch(0.3)
    assert 0.29 < cost.switch_s < 0.3, "an exponential average"


def test_steps_that_the_host_launches_say_nothing_about_those_that_are_graphs() -> None:
    cost, size = CostModel(), step(64)
    for turn in range(200):
        slow = turn % 5 == 0
        cost.observe_step(size._replace(launched=slow), 0.04 if slow else 0.006)
    assert cost.costs.step_s(size) == pytest.approx(0.006, rel=0.1)
    assert cost.costs.launched_s == pytest.approx(0.034, rel=0.1)


def test_time_is_attributed_to_lanes_until_a_merged_step_is_seen() -> None:
    cost = CostModel(TRUE.thresholds)
    unmerged, merged = step(512, (512,)), step(512)
    for _ in range(50):
        learn(cost, unmerged)
    assert cost.costs.step_s(unmerged) > 2 * cost.costs.step_s(merged), "so that the policy tries merging"
    for _ in range(20):
        learn(cost, merged)
    assert relative_error(cost, merged) < 0.05
    assert relative_error(cost, unmerged) < 0.1


@pytest.mark.parametrize(
    ("machine", "noise", "sizes", "most"),
    [
        # Steps that were never observed.
        (
            TRUE,
            0.02,
            [step(n, lanes) for n, lanes in ((32, (2,) * 16), (33, (1,) * 24 + (9,)), (512, (128,) * 4))],
            0.05,
        ),
        (TRUE, 0.05, [some_step(random.Random(seed)) for seed in range(100)], 0.1),
        (
            TRUE._replace(**THIN._asdict() | {"short_lane": 8}),
            0.02,
            [step(n) for n in (1, 4, 8, 16, 32, 64, 512)],
            0.06,
        ),
    ],
    ids=["unseen", "noisy", "widths"],
)
def test_a_machine_is_learned_despite_noise(machine: Costs, noise: float, sizes: list[StepSize], most: float) -> None:
    draws, cost = random.Random(3), CostModel(machine.thresholds)
    for _ in range(300):
        size = some_step(draws)
        cost.observe_step(size, machine.step_s(size) * draws.gauss(1, noise))
    for size in sizes:
        assert cost.costs.step_s(size) == pytest.approx(machine.step_s(size), rel=most), size
    if machine is TRUE and noise < 0.05:
        for tokens in (8, 9, 400):
            assert cost.costs.lanes_s(tokens) == pytest.approx(TRUE.lanes_s(tokens), rel=0.15)


def test_interruptions_slowdowns_and_long_decoding() -> None:
    """One step in thirty takes up to ten times as long, because another process had the cores; then the machine is
    slowed down for good, and then decodes for long."""
    draws = random.Random(7)
    cost = CostModel(TRUE.thresholds)
    errors = []
    for number in range(400):
        size = some_step(draws)
        if number >= 100:
            errors.append(relative_error(cost, size))
        learn(cost, size, draws.uniform(2, 10) if draws.random() < 0.03 else draws.gauss(1, 0.03))
    assert sorted(errors)[int(0.9 * len(errors))] < 0.1
    decoding, prompts = step(8, (2,) * 4, 8000), step(512, (200, 200, 112))
    assert relative_error(cost, decoding, slow=2) > 0.4
    for _ in range(100):
        learn(cost, some_step(draws), slow=2)
    assert relative_error(cost, decoding, slow=2) < 0.15 and relative_error(cost, prompts, slow=2) < 0.15
    for i in range(5000):
        learn(cost, step(16, (2,) * 8, 16 * i), slow=2)
    assert relative_error(cost, step(16, (2,) * 8, 80_000), slow=2) < 0.01
    assert relative_error(cost, prompts, slow=2) < 0.5


sizes = st.builds(
    lambda tokens, lanes, context: StepSize(tokens, tuple(lanes), context),
    st.integers(1, 600),
    st.lists(st.integers(1, 600), max_size=20),
    st.integers(0, 10**6),
)


# Clocks that have not advanced, were set, or stood still; and sizes of which several are alike or proportional.
times = st.floats(1e-5, 100) | st.sampled_from([0.0, -3.0, 5e-324, 1e-19, 1e-9, 1e9, math.inf])
alike = st.sampled_from(
    [step(100, (100,)), step(1, (), 99), step(2, (), 198), step(512), step(4), step(1, (1,), 10**6)]
)


@settings(max_examples=scaled(100))
@given(samples=st.lists(st.tuples(sizes | alike, times), max_size=40), predicted=sizes, more=st.integers(1, 600))
def test_estimates_are_nonnegative_and_grow_with_the_step(
    samples: list[tuple[StepSize, float]], predicted: StepSize, more: int
) -> None:
    """Growth in tokens, context, a further lane, or a token in a lane that stays short or long."""
    cost = CostModel(TokenThresholds(short_lane=8, hidden_tokens=8, thin_tokens=32))
    seen = []
    for size, seconds in samples:
        cost.observe_step(size, seconds)
        seen.append(measured_s(seconds))
        for known, _ in samples[: len(seen)]:
            assert min(seen) / 64.1 <= cost.costs.step_s(known) <= 8.1 * max(seen), "within a factor of what was seen"
        estimate = cost.costs.step_s(predicted)
        assert 0 <= estimate < math.inf
        lanes = predicted.lanes
        longer = [(*lanes[:i], lane + 1, *lanes[i + 1 :]) for i, lane in enumerate(lanes) if lane != 8]
        for larger in (
            predicted._replace(num_tokens=predicted.num_tokens + more),
            predicted._replace(num_context=predicted.num_context + more),
            *(predicted._replace(lanes=each) for each in ((*lanes, more), *longer)),
        ):
            assert estimate <= cost.costs.step_s(larger) * (1 + 1e-12)


@pytest.mark.parametrize("seconds", [[0.0], [-5.0, 1.0], [1e-19, 1e9]])
def test_whoever_divides_by_a_learned_time_stays_finite(seconds: list[float]) -> None:
    cost, prices, calls = CostModel(), PiecePrices(), CallQueue[str](join_rows=1)
    now = at_s = 0.0
    promise = LatencyPromise(2.0, lambda: now, 4)
    for client in ("a", "b"):
        calls.join(client)
    for each in seconds:
        cost.observe_encoding(100, each)
        cost.observe_encoding(0, each)
        cost.observe_switch(each)
        prices.observe(Piece("layer", 7), each)
        promise.add("r")
        now += -1e5 if each < 0 else min(each, 1e5)
        promise.served(each)
        promise.spent(each)
        promise.release("r")
        for client, rows in (("a", 9), ("b", 1)):  # a's call is cut into pieces
            calls.add(Call(client, "key", rows, at_s))
        while len(calls):
            at_s += 1.0
            batch = calls.next(at_s)
            assert 0 < sum(call.rows for call in batch) <= 9
            calls.computed(batch, each, at_s)
        assert 0 <= cost.costs.patch_s < 1e5 and 0 <= cost.switch_s <= 1e5
        assert 1 <= encode_budget(None, cost.costs, 0.5) < 1e9 and 0 < prices.expected_s(Piece("layer", 7)) <= 1e5
        assert 0 <= promise.usual_room_s <= 1e6 and 0 <= promise.utilization <= 1
