"""Sample sizes of promises against the bound that decides them."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rich.console import Console

from fusion.data.load import DomainData
from fusion.packing.bounds import score_with_bound
from fusion.packing.sample_sizes import POWER, samples_needed
from fusion.phases.plan_checked import PlanChecked
from fusion.plan.estimate import Estimate
from fusion.plan.lora_size import LoraSize
from fusion.plan.schema import DomainPlan, Plan, RelativeThreshold
from fusion.plan.summary import print_summary
from fusion.teachers.labelling import TeacherResult
from tests.fusion.small import color_splits
from vlora.plan_files.errors import PlanText


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
