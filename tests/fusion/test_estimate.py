"""Time estimates of a plan, from measured steps and the number of trainings that its packing may need."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from fusion.data.load import DomainData
from fusion.packing.training_counts import max_trainings, min_trainings
from fusion.phases.data_ready import load_frozen_base
from fusion.plan.estimate import estimate
from fusion.plan.schema import Plan
from fusion.progress.progress import Progress
from fusion.training.trainer import LoraTrainer
from tests.fusion.small import color_splits, plan_of, write_base


def data(*names: str) -> dict[str, DomainData]:
    return {name: DomainData(color_splits(), None) for name in names}


def made(folder: Path, *names: str, **training: Any) -> Plan:
    return plan_of(write_base(folder / "base"), names, **training)


def test_an_estimate_is_near_what_steps_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made(tmp_path, "a", "b", steps=1000, batch_size=4)
    taken: list[int] = []

    def time_step(self: LoraTrainer, rows: list[str]) -> float:
        taken.append(len(rows))
        return 0.1 * len(rows)

    monkeypatch.setattr(LoraTrainer, "time_step", time_step)
    found = estimate(plan, data("a", "b"), load_frozen_base(plan, "cpu", Progress()))
    assert taken[:5] == [2, 2, 2, 2, 4] and set(taken[4:]) == {4}, "a few samples first, then whole batches"
    assert found.step_s == pytest.approx(0.4) and found.measured_samples == 4 and 1 <= found.measured_steps <= 8
    assert found.at_least_s > 2 * 1000 * 0.4 and found.at_most_s > 3 * 1000 * 0.4
    assert found.at_most_s < 3 * 1000 * 0.4 * 1.5, "scoring and encoding a hundred small pictures takes little time"


def test_a_step_that_takes_long_is_measured_on_a_few_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made(tmp_path, "a", steps=10, batch_size=12)
    seconds = itertools.chain([90.0, 3.0], itertools.repeat(2.0))  # the first step of a process, then later ones
    monkeypatch.setattr(LoraTrainer, "time_step", lambda self, rows: next(seconds))
    found = estimate(plan, data("a"), load_frozen_base(plan, "cpu", Progress()))
    assert (found.measured_steps, found.measured_samples, found.step_s) == (1, 1, pytest.approx(24.0))


def test_the_time_that_a_plan_allows_bounds_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraTrainer, "time_step", lambda self, rows: 1.0)
    plan = made(tmp_path, "a", steps=10_000, batch_size=2, seconds=30.0)
    found = estimate(plan, data("a"), load_frozen_base(plan, "cpu", Progress()))
    assert 30 < found.at_most_s < 5000, "all steps would take 10,000 s"


def test_real_steps_are_measured_and_change_no_training(tmp_path: Path) -> None:
    plan = made(tmp_path, "a", steps=3, batch_size=4)
    found = estimate(plan, data("a"), load_frozen_base(plan, "cpu", Progress()))
    assert 0 < found.step_s < 60 and found.threads is not None


@pytest.mark.parametrize(
    ("packing", "order", "alone", "fewest", "most"),
    [
        ("naive", ("given",), (), 3, 5),
        ("first_fit", ("given", "random"), (), 6, 9),
        ("first_fit", ("given",), ("a", "b", "c"), 5, 6),  # the first domain alone is already the first adapter
        ("jointly", ("given",), (), 3, 18),
        ("guided", ("given",), (), 3, 6),
        ("guided", ("given",), ("a", "b", "c"), 6, 9),
    ],
)
def test_how_many_trainings_a_packing_may_need(
    packing: str, order: tuple[str, ...], alone: tuple[str, ...], fewest: int, most: int
) -> None:
    plan = plan_of("x", ("a", "b", "c")).model_copy(update={"packing": packing, "order": order})
    assert (min_trainings(plan, alone), max_trainings(plan, alone)) == (fewest, most)
