"""Held-back samples share no group with training samples, and calibrate heads if calibration changes answers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fusion.data.samples import Sample, held_back

FRAME = (np.zeros((1, 1, 3), np.uint8),)


@given(st.lists(st.integers(0, 12), max_size=150))
def test_groups_are_kept_whole(numbers: list[int]) -> None:
    """Group 0 means no group: independent samples."""
    samples = [Sample(FRAME, 0, group=str(number or "")) for number in numbers]
    kept = held_back(samples)
    inside = {samples[place].group for place in kept} - {""}
    outside = {sample.group for place, sample in enumerate(samples) if place not in kept}
    assert not inside & outside
    assert len(kept) <= len(samples) // 10 and list(kept) == sorted(set(kept))


def test_samples_that_stand_alone_are_the_first_tenth() -> None:
    samples = [Sample(FRAME, 0) for _ in range(1000)]
    assert held_back(samples[:59]) == tuple(range(5))
    assert held_back(samples) == tuple(range(64))
    assert held_back(samples[:9]) == ()


def test_a_group_too_large_to_hold_back_is_trained_on() -> None:
    large = [Sample(FRAME, 0, group="long")] * 18
    assert held_back([*large, Sample(FRAME, 0, group="short"), Sample(FRAME, 0, group="short")]) == (18, 19)
    assert held_back(large) == ()
