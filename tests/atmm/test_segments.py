"""Plans: what they accept."""

from __future__ import annotations

import pytest

from atmm import Lane, SegmentPlan


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
