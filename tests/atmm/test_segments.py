"""Plans: validation of lanes, and refill."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atmm import STRATEGIES, Lane, SegmentPlan
from tests.atmm.cases import check_against_reference, check_group_against_reference, make_group, make_input
from tests.example_counts import scaled


@pytest.mark.parametrize("lane", (Lane("a", -1, 2), Lane("a", 0, 6), Lane("a", 3, 2), Lane("a", 6, 6)))
def test_a_lane_outside_the_batch_is_refused(lane: Lane) -> None:
    with pytest.raises(ValueError, match=rf"start={lane.start}, stop={lane.stop}.*5 tokens"):
        SegmentPlan(5, [lane])


@pytest.mark.parametrize("sign", (0.0, 0.5, -2.0, float("nan")))
def test_a_sign_other_than_plus_and_minus_one_is_refused(sign: float) -> None:
    with pytest.raises(ValueError, match=f"sign {sign}"):
        SegmentPlan(5, [Lane("a", 0, 5, sign)])


def test_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        SegmentPlan(-1, [])


def test_empty_lanes_are_dropped() -> None:
    plan = SegmentPlan(5, [Lane("a", 2, 2), Lane("b", 0, 5)])
    assert plan.keys == {"b"}
    assert plan.lanes == (Lane("b", 0, 5),)


ROOM_KEYS = "abc"


@st.composite
def fillings(draw: st.DrawFn) -> list[list[Lane]]:
    """Successive lanes of a plan of nine tokens with room for six lanes."""
    filled = []
    for _ in range(draw(st.integers(2, 4))):
        lanes, at = [], 0
        for key in draw(st.lists(st.sampled_from(ROOM_KEYS), max_size=5)):
            at += draw(st.integers(0, 1))
            stop = min(9, at + draw(st.integers(0, 4)))
            lanes.append(Lane(key, min(9, at), stop))
            at = stop
        if draw(st.booleans()):
            lanes.append(Lane(draw(st.sampled_from(ROOM_KEYS)), 0, draw(st.integers(0, 9)), -1.0))
        filled.append(lanes)
    return filled


@pytest.mark.slow
@settings(max_examples=scaled(100))
@given(fillings(), st.sampled_from([*STRATEGIES, None]), st.booleans())
def test_a_plan_with_room_computes_what_it_holds_now(
    filled: list[list[Lane]], strategy: str | None, packed: bool
) -> None:
    group = make_group({"a": 3, "b": 8, "c": 4}, missing=[("b", 1)], dtype=torch.float64)
    if packed:
        group.pack(ROOM_KEYS)
    elif strategy is not None:
        strategy = "loop"
    plan = SegmentPlan(9, filled[0], strategy, room=6)
    for lanes in filled:
        plan.refill(lanes)
        x, outputs = make_input(9, group, torch.float64)
        check_against_reference(group, plan, x, outputs)
        check_group_against_reference(group, plan, x, outputs)


def test_lanes_beyond_the_room_are_refused_and_change_nothing() -> None:
    plan = SegmentPlan(4, [Lane("a", 0, 2)], room=2)
    for lanes, words in (
        ([Lane("a", 0, 1), Lane("b", 1, 2), Lane("c", 2, 3)], "3 lanes, up to 1 per token; the plan has room for 2"),
        ([Lane("a", 0, 5)], "batch of 4 tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            plan.refill(lanes)
        with pytest.raises(ValueError, match=words):
            SegmentPlan(4, lanes, room=2)
    with pytest.raises(ValueError, match="up to 3 per token"):
        SegmentPlan(4, [Lane(key, 0, 4) for key in "abc"], room=3)
    assert plan.lanes == (Lane("a", 0, 2),)
    with pytest.raises(ValueError, match="without room"):
        SegmentPlan(4, []).refill([Lane("a", 0, 1)])


def test_adapters_that_are_not_packed_cannot_be_refilled() -> None:
    group = make_group({"a": 4, "b": 8})
    group.pack("a")
    plan = SegmentPlan(4, [Lane("a", 0, 2)], room=2)
    check_against_reference(group, plan, *make_input(4, group, torch.float32))
    with pytest.raises(ValueError, match="adapters that are not packed: b"):
        plan.refill([Lane("b", 0, 2)])
    assert plan.lanes == (Lane("a", 0, 2),)
