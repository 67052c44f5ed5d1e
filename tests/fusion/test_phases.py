"""From a plan to its packing, with scripted trainings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusion.packing.algorithm import Adapter, Score, TrainingResult
from fusion.phases.packing import orders_of, packing_of
from fusion.phases.thresholds import thresholds_of
from fusion.plan.schema import DomainPlan, Plan, RelativeThreshold

ALONE = {"a": 0.95, "b": 0.7, "c": 0.85}
COUNTS = dict.fromkeys(ALONE, 60)
TURNS = {"a": 0.0, "b": 150.0, "c": 40.0}


class Shown:
    """A domain with features only."""

    def __init__(self, degrees: float) -> None:
        self.degrees = np.radians(degrees)

    def features(self) -> np.ndarray:
        return np.array([np.cos(self.degrees), np.sin(self.degrees)])


DOMAINS: Any = {name: Shown(turn) for name, turn in TURNS.items()}


def train(adapter: Adapter) -> TrainingResult:
    """Each domain loses six points next to others, and `c` another ten next to `a`."""
    lost = {name: 0.06 * (len(adapter) > 1) + 0.1 * (name == "c" and "a" in adapter) for name in adapter}
    return TrainingResult(
        {name: Score(ALONE[name] - lost[name], ALONE[name] - lost[name] - 0.02) for name in adapter}, 1.0
    )


def plan(*order: str, minus: float = 0.1, **more: Any) -> Plan:
    threshold = RelativeThreshold(relative_to="alone", minus=minus)
    domains = tuple(DomainPlan(name=name, source="made", question="what?", threshold=threshold) for name in ALONE)
    return Plan(**({"packing": "first_fit", "order": order} if order else {}) | more, domains=domains)


def test_a_relative_threshold_is_the_score_alone_minus_a_margin() -> None:
    assert thresholds_of(plan(minus=0.05), train, {}, COUNTS) == pytest.approx({"a": 0.9, "b": 0.65, "c": 0.8})
    lines: list[str] = []
    assert thresholds_of(plan(minus=0.75), train, {}, COUNTS, lines.append)["b"] == 0.0
    assert len(lines) == 1 and lines[0].startswith("b reaches 0.700 alone; minus 0.75, its threshold is 0")


def test_a_bound_that_is_too_wide_for_the_margin_is_named() -> None:
    lines: list[str] = []
    thresholds_of(plan(minus=0.05), train, {}, COUNTS, lines.append)
    assert not lines, "the bound is 0.02 below the score"
    thresholds_of(plan(minus=0.01), train, {}, COUNTS, lines.append)
    assert [line.split()[0] for line in lines] == ["a", "b", "c"]
    assert lines[0].startswith(
        "a reaches 0.950 alone and misses its threshold of 0.940 (minus 0.01), because the lower bound of 60 "
        "validation samples is 0.930; add"
    )


def test_a_threshold_relative_to_a_teacher_needs_no_training() -> None:
    threshold = RelativeThreshold(relative_to="teacher", minus=0.1)
    domains = (DomainPlan(name="a", source="made", question="what?", threshold=threshold),)

    def never(adapter: Adapter) -> TrainingResult:
        raise AssertionError("trained")

    assert thresholds_of(Plan(domains=domains), never, {"a": 0.85}, COUNTS) == pytest.approx({"a": 0.75})


def test_candidate_orders_by_name() -> None:
    orders = orders_of(plan("given", "hardest_first", "similarity", "random", "random"), DOMAINS, train)
    assert orders[:3] == [("a", "b", "c"), ("b", "c", "a"), ("a", "c", "b")]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders[3:])
    seeds = {orders_of(plan("random", "random", seed=seed), DOMAINS, train)[1] for seed in range(20)}
    assert len(seeds) > 3


def test_first_fit_uses_adapters_that_the_papers_variant_has_closed() -> None:
    def pack(packing: str, *order: str) -> list[Adapter]:
        made = plan(*order, packing=packing)
        cache: Any = train  # neither way of packing does more than call it
        thresholds = thresholds_of(made, train, {}, COUNTS)
        return list(packing_of(made, DOMAINS, thresholds, cache, lambda line: None).adapters)

    assert pack("naive") == [("a", "b"), ("c",)]
    assert pack("naive", "similarity") == [("a",), ("c", "b")]
    assert pack("first_fit", "similarity") == [("a", "b"), ("c",)]
    # Both orders need two adapters; the larger margin wins, whichever is named first.
    assert pack("first_fit", "given", "similarity") == pack("first_fit", "similarity", "given")
