"""How many trainings a plan's packing needs, before any of them has run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusion.packing.guided import BUDGET, starts_with_all
from fusion.plan.schema import Plan


def trained_alone(plan: Plan, teacher_scores: Mapping[str, float]) -> tuple[str, ...]:
    """Domains that are trained alone in any case: for their thresholds, or for the order."""
    every = "hardest_first" in plan.order
    return tuple(
        domain.name
        for domain in plan.domains
        if every or domain.threshold_before_training(teacher_scores.get(domain.name)) is None
    )


def min_trainings(plan: Plan, alone: Sequence[str]) -> int:
    """Minimum number of single-domain trainings of a run, if every domain fits where it is tried first.

    A joint training counts once per domain.

    Args:
        alone: domains that are trained alone in any case.
    """
    number = len(plan.domains)
    if number == 1:
        return 1
    if plan.packing == "guided":
        return len(alone) + number * (1 if starts_with_all(number, len(alone) == number) else BUDGET)
    orders = 1 if plan.packing == "jointly" else len(plan.order)
    again = plan.packing != "jointly" and plan.domains[0].name in alone  # the first domain starts alone in its adapter
    return len(alone) + orders * number - (1 if again else 0)


def max_trainings(plan: Plan, alone: Sequence[str]) -> int:
    """Maximum number of single-domain trainings of a run.

    Guided packing has a budget. With the others every domain is trained alone, and also: into the last adapter (naive);
    into each adapter that earlier domains created (first fit); or all jointly, then one fewer each time, and every pair
    of the remaining sets (jointly).

    Args:
        alone: domains that are trained alone in any case.
    """
    number = len(plan.domains)
    if number == 1:
        return 1
    if plan.packing == "guided":
        return len(alone) + BUDGET * number
    pairs = number * (number - 1) // 2
    beside_others = {
        "naive": (number - 1) * len(plan.order),
        "first_fit": pairs * len(plan.order),
        "jointly": pairs + number + pairs * number,
    }
    return number + beside_others[plan.packing]
