"""Confidence bounds against their definition: how often they exceed the true value."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import binom

from fusion.data.load import DomainData
from fusion.data.samples import Splits, Target
from fusion.phases.plan_checked import LoraSize, PlanChecked
from fusion.plan.estimate import Estimate
from fusion.plan.schema import DomainPlan, Plan, RelativeThreshold
from fusion.plan.summary import POWER, print_summary, samples_needed
from fusion.plan.tasks import MEANS
from fusion.teachers.labelling import TeacherResult
from fusion.training.objectives import objective_of
from fusion.training.scoring import score_with_bound
from heads import Box
from tests.fusion.small import color_splits
from vlora.plan_files.errors import PlanText


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


DRAWS = [
    ("detection", "f1", boxes(0.7)),
    pytest.param("detection", "map", boxes(0.7), marks=pytest.mark.exhaustive),
    pytest.param("classification", "f1", labels(0.8), marks=pytest.mark.exhaustive),
    ("classification", "f1", labels(0.98)),
    pytest.param("captioning", "token_f1", words(0.7), marks=pytest.mark.exhaustive),
    ("captioning", "token_f1", words(0.99)),
]


@pytest.mark.slow
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


def passes(number: int, threshold: float, true: float) -> float:
    """The probability that the lower bound at 0.95 of `number` samples reaches the threshold, by the bound itself."""

    def reaches(right: int) -> bool:
        answers = [1] * right + [0] * (number - right)
        mean = lambda found, targets: float(np.mean(np.equal(found, targets)))  # noqa: E731
        return score_with_bound(mean, answers, [1] * number, mean=True, confidence=0.95).lower >= threshold

    low, high = 0, number + 1  # the smallest number of correct answers that reaches it
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle <= number and reaches(middle) else (middle + 1, high)
    return sum(math.comb(number, k) * true**k * (1 - true) ** (number - k) for k in range(low, number + 1))


@pytest.mark.parametrize(("threshold", "better"), [(0.6, 0.2), (0.8, 0.15), (0.9, 0.08)])
def test_a_good_adapter_passes_with_the_wanted_probability(threshold: float, better: float) -> None:
    needed = samples_needed(threshold, better, 0.95)
    assert needed is not None
    assert passes(needed, threshold, threshold + better) >= POWER
    assert all(passes(n, threshold, threshold + better) < POWER for n in range(needed - 6, needed))


def test_a_perfect_adapter_needs_as_many_samples_as_prove_its_threshold() -> None:
    assert samples_needed(0.98, 0.05, 0.95) == math.ceil(math.log(0.05) / math.log(0.98))


def test_an_unknown_threshold_needs_the_most_samples() -> None:
    most = samples_needed(None, 0.05, 0.95)
    known = [samples_needed(threshold / 20, 0.05, 0.95) for threshold in range(1, 20)]
    assert most is not None and all(needed is not None and needed <= 1.01 * most for needed in known)
    assert samples_needed(None, 0.001, 0.95) is None


@pytest.mark.parametrize(
    ("minus", "power"),
    [
        (0.1, "needs 82 validation samples at a confidence of 0.95, so that an adapter 0.1 above the threshold passes"),
        (0.0, "an adapter as good as its teacher passes in at most 5% of runs at a confidence of 0.95 (warning: set"),
    ],
)
def test_the_margin_of_a_relative_threshold_is_the_plans(minus: float, power: str) -> None:
    threshold = RelativeThreshold(relative_to="teacher", minus=minus)
    plan = Plan(domains=(DomainPlan(name="a", source="made", question="what?", threshold=threshold),))
    data = {"a": DomainData(color_splits(), TeacherResult("theirs", 0.8 + minus))}
    printed = io.StringIO()
    estimate = Estimate(1.0, 2.0, 0.1, 32, 1, 32, "cpu", 1)
    print_summary(PlanChecked(plan, PlanText(), data, LoraSize(1, 1)), estimate, Console(file=printed))
    assert f"power     {power}" in printed.getvalue()
