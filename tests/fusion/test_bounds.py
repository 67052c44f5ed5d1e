"""Confidence bounds, against their definition: how often they promise too much."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fusion.bounds import bounded
from heads import Box
from heads.boxes import f1


def share(answers: object, targets: object) -> float:
    return float(np.mean(np.equal(answers, targets)))


def tail(right: int, number: int, p: float) -> float:
    return sum(math.comb(number, k) * p**k * (1 - p) ** (number - k) for k in range(right, number + 1))


@pytest.mark.parametrize(("right", "number"), [(1, 10), (8, 10), (270, 300), (300, 300)])
def test_a_share_is_bounded_as_clopper_and_pearson_define_it(right: int, number: int) -> None:
    """At the bound, as many right answers or more would come with just the probability that is left."""
    answers = [1] * right + [0] * (number - right)
    score = bounded(share, answers, [1] * number, confidence=0.95)
    assert score.value == right / number
    assert tail(right, number, score.lower) == pytest.approx(0.05, rel=1e-6)


def test_nothing_right_promises_nothing() -> None:
    assert bounded(share, [0] * 20, [1] * 20, confidence=0.95) == (0.0, 0.0)


def test_the_bound_of_f1_holds_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    box = Box(0, 0.1, 0.1, 0.3, 0.3)

    def draw(number: int) -> tuple[list[object], list[object]]:
        seen, wanted = rng.random(number) < 0.7, rng.integers(1, 3, number)
        other = Box(0, 0.6, 0.6, 0.9, 0.9)
        return [(box,) if s else () for s in seen], [(box, other)[:w] for w in wanted]

    truth = f1(*draw(20_000))  # type: ignore[arg-type]
    held = sum(bounded(f1, *draw(60), confidence=0.9, seed=turn).lower <= truth for turn in range(30))  # type: ignore[arg-type]
    assert held >= 21  # 27 expected; fewer than 21 would be 1 in 2,000 for a bound that is right


def test_a_surer_bound_is_lower() -> None:
    answers = [1] * 80 + [0] * 20
    found = [bounded(share, answers, [1] * 100, confidence=c).lower for c in (0.8, 0.95, 0.99)]
    assert found == sorted(found, reverse=True) and found[0] < 0.8
