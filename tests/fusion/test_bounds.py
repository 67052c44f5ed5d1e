"""Confidence bounds against their definition: how often they exceed the true value."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from fusion.data.samples import Splits, Target
from fusion.packing.bounds import score_with_bound
from fusion.plan.tasks import MEANS
from fusion.training.objectives import objective_of
from heads import Box

pytestmark = pytest.mark.slow


def share(answers: Any, targets: Any) -> float:
    return float(np.mean(np.equal(answers, targets)))


def tail(right: int, number: int, p: float) -> float:
    return sum(math.comb(number, k) * p**k * (1 - p) ** (number - k) for k in range(right, number + 1))


@pytest.mark.parametrize(("right", "number"), [(1, 10), (8, 10), (270, 300), (300, 300)])
def test_a_share_has_clopper_and_pearsons_bound(right: int, number: int) -> None:
    """At the bound, at least this many right answers have a probability of 1 - confidence."""
    answers = [1] * right + [0] * (number - right)
    score = score_with_bound(share, answers, [1] * number, mean=True, confidence=0.95)
    assert score.value == right / number
    assert tail(right, number, score.lower) == pytest.approx(0.05, rel=1e-6)


def test_the_bound_without_a_correct_sample_is_zero() -> None:
    assert score_with_bound(share, [0] * 20, [1] * 20, mean=True, confidence=0.95) == (0.0, 0.0)


Draw = Callable[[np.random.Generator, int], tuple[list[object], list[Target]]]
HERE, THERE = Box(0, 0.1, 0.1, 0.3, 0.3), Box(0, 0.6, 0.6, 0.9, 0.9)


def boxes(found: float) -> Draw:
    """One or two objects per picture; the detector finds the first with probability `found`, with higher confidence."""

    def draw(rng: np.random.Generator, number: int) -> tuple[list[object], list[Target]]:
        answers: list[object] = []
        targets: list[Target] = []
        for seen, count in zip(rng.random(number) < found, rng.integers(1, 3, number), strict=True):
            box = (HERE if seen else THERE._replace(image=1))._replace(score=rng.random() * (1 if seen else 0.9))
            answers.append((box,))
            targets.append((HERE, THERE)[:count])
        return answers, targets

    return draw


def labels(right: float) -> Draw:
    """Three labels, one of them rare; a wrong answer is the next label."""

    def draw(rng: np.random.Generator, number: int) -> tuple[list[object], list[Target]]:
        truth = rng.choice(3, number, p=(0.5, 0.35, 0.15))
        answers = np.where(rng.random(number) < right, truth, (truth + 1) % 3)
        return answers.tolist(), truth.tolist()

    return draw


def words(right: float) -> Draw:
    def draw(rng: np.random.Generator, number: int) -> tuple[list[object], list[Target]]:
        answers = [" ".join(np.where(rng.random(4) < right, list("abcd"), "x")) for _ in range(number)]
        return list(answers), ["a b c d"] * number

    return draw


DRAWS: list[tuple[str, str, Draw]] = [
    ("detection", "f1", boxes(0.7)),
    ("detection", "map", boxes(0.7)),
    ("classification", "f1", labels(0.8)),
    ("classification", "f1", labels(0.98)),
    ("captioning", "token_f1", words(0.7)),
    ("captioning", "token_f1", words(0.99)),
]


@pytest.mark.parametrize(("task", "name", "draw"), DRAWS)
def test_a_resampled_bound_has_its_nominal_coverage(task: str, name: str, draw: Draw) -> None:
    """The metric of a large sample serves as its true value."""
    chosen = () if task == "captioning" else ("a", "b", "c")
    metric = objective_of(Splits(task, chosen, (), (), (), real=True), name).metric
    rng = np.random.default_rng(0)
    truth = metric(*draw(rng, 4_000))
    held = 0
    turns, number = (20, 30) if task == "detection" else (60, 60)  # boxes take longest to compare
    for turn in range(turns):
        answers, targets = draw(rng, number)
        held += score_with_bound(metric, answers, targets, mean=name in MEANS, confidence=0.9, seed=turn).lower <= truth
    assert held >= binom.ppf(1e-3, turns, 0.9), held


def several(right: float) -> Draw:
    """Up to three labels per sample; each is recognized with probability `right`."""

    def draw(rng: np.random.Generator, number: int) -> tuple[list[object], list[Target]]:
        truth = rng.random((number, 3)) < 0.3
        answers = np.where(rng.random((number, 3)) < right, truth, ~truth)
        of = [[tuple(np.flatnonzero(row).tolist()) for row in rows] for rows in (answers, truth)]
        return list(of[0]), list(of[1])

    return draw


def yes_or_no(right: float) -> Draw:
    def draw(rng: np.random.Generator, number: int) -> tuple[list[object], list[Target]]:
        truth = rng.random(number) < 0.3
        return np.where(rng.random(number) < right, truth, ~truth).astype(int).tolist(), truth.astype(int).tolist()

    return draw


@pytest.mark.parametrize(
    ("task", "draw"), [("detection", boxes(0.7)), ("multi_label", several(0.8)), ("binary", yes_or_no(0.8))]
)
def test_a_bound_by_counts_is_that_of_the_metric(task: str, draw: Draw) -> None:
    chosen = ("no", "yes") if task == "binary" else ("a", "b", "c")
    objective = objective_of(Splits(task, chosen, (), (), (), real=True), "f1")
    answers, targets = draw(np.random.default_rng(3), 50)
    bound = functools.partial(score_with_bound, answers=answers, targets=targets, mean=False, confidence=0.9, seed=5)
    by_metric = bound(objective.metric)
    counts = objective.f1_counts(answers, targets)
    assert by_metric.lower < by_metric.value < 1 and len(counts) == 50
    assert bound(share, counts=counts) == by_metric


def test_other_metrics_have_no_counts() -> None:
    for task, name in (
        ("detection", "map"),
        ("multi_label", "accuracy"),
        ("classification", "f1"),
        ("vqa", "token_f1"),
    ):
        labels = () if task == "vqa" else ("a", "b")
        assert objective_of(Splits(task, labels, (), (), (), real=True), name).f1_counts([0], [0]) == []


@pytest.mark.parametrize(("task", "name", "right"), [("detection", "map", (HERE,)), ("classification", "f1", 1)])
def test_few_correct_samples_have_a_low_bound(task: str, name: str, right: Target) -> None:
    """About Clopper and Pearson's bound; resampling only the samples would give 1."""
    metric = objective_of(Splits(task, ("a", "b", "c"), (), (), (), real=True), name).metric
    score = score_with_bound(metric, [right] * 10, [right] * 10, mean=False, confidence=0.95)
    assert score.value == 1.0 and score.lower == pytest.approx(0.05**0.1, abs=0.06)


def test_a_higher_confidence_gives_a_lower_bound() -> None:
    answers = [1] * 80 + [0] * 20
    found = [score_with_bound(share, answers, [1] * 100, mean=True, confidence=c).lower for c in (0.8, 0.95, 0.99)]
    assert found == sorted(found, reverse=True) and found[0] < 0.8
