"""What all benches have in common: their form, goals that hold and can fail, published results, quick runs."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.bench.reports import MAKERS, report_of
from vlora.bench import BENCHES
from vlora.bench.report import Goal

RESULTS = Path(__file__).parents[2] / "docs" / "results"
WITHOUT_GOALS = {"prefill", "teachers"}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_has_the_common_form(name: str) -> None:
    bench = importlib.import_module(f"vlora.bench.{BENCHES[name]}")
    first, *others = inspect.signature(bench.run).parameters
    assert first == "quick" and bench.__doc__ and bench.run.__doc__
    if getattr(bench, "GOES_ON", False):
        assert others.pop(0) == "partial"
    if hasattr(bench, "draw"):
        inspect.signature(bench.draw).bind([], Path())


@pytest.mark.parametrize("name", BENCHES)
def test_goals_hold_for_measurements_that_meet_them_and_for_no_others(name: str) -> None:
    """An inverted ratio, or a goal that cannot fail, is noticed."""
    assert (name in WITHOUT_GOALS) != (name in MAKERS)
    if name in WITHOUT_GOALS:
        return
    met, missed = (report_of(name, slow) for slow in (1.0, 100.0))
    assert met.goals and met.bench == name
    assert [goal.name for goal in met.goals if not goal.holds] == []
    assert [goal.name for goal in missed.goals if goal.holds] == []
    assert len(missed.goals) == len(met.goals) == len({goal.name for goal in met.goals})
    assert json.loads(json.dumps(met.as_dict(), default=str))["goals"][0]["holds"] is True


@pytest.mark.parametrize(
    ("value", "at_most", "holds"),
    (
        (0.9, True, True),
        (1.0, True, True),
        (1.1, True, False),
        (0.9, False, False),
        (1.0, False, True),
        (1.1, False, True),
    ),
)
def test_a_goal_is_an_upper_or_a_lower_bound(value: float, at_most: bool, holds: bool) -> None:
    goal = Goal("a ratio", value, 1.0, at_most)
    assert goal.holds is holds
    assert goal.as_dict() == {
        "name": "a ratio",
        "value": value,
        "goal": f"{'<=' if at_most else '>='} 1",
        "holds": holds,
    }
    assert not Goal("not measured", float("nan"), 1.0, at_most).holds


@pytest.mark.parametrize("kept", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_published_goals_follow_from_their_values(kept: Path) -> None:
    found = json.loads(kept.read_text())
    for goal in found.get("goals", ()):
        sign, bound = goal["goal"].split()
        at_most = {"<=": True, ">=": False}[sign]
        rounding = 5e-5 + 1e-5 * abs(float(bound))  # values and bounds are rounded in the file
        near = abs(goal["value"] - float(bound)) <= rounding
        assert near or goal["holds"] == Goal("", goal["value"], float(bound), at_most).holds, goal
    if "env" in found:
        assert found["env"]["machine"] and found["env"]["commit"]
