"""Time estimates of a plan, from measured steps and the number of trainings that its packing may need."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from fusion.data.load import DomainData
from fusion.data.samples import Splits
from fusion.packing.training_counts import max_trainings, min_trainings
from fusion.phases.data_ready import load_frozen_base
from fusion.plan.estimate import estimate
from fusion.plan.image_heads import HEAD_SAMPLES, HEAD_STEPS
from fusion.plan.schema import Plan
from fusion.progress.progress import Progress
from fusion.training.trainer import LoraTrainer, StepTime
from tests.fusion.small import color_splits, plan_of, write_base
from tests.fusion.test_robust_training import boxes


def data(*names: str) -> dict[str, DomainData]:
    return {name: DomainData(color_splits(), None) for name in names}


def made(folder: Path, *names: str, **training: Any) -> Plan:
    return plan_of(write_base(folder / "base"), names, **training)


def test_an_estimate_is_near_what_steps_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made(tmp_path, "a", "b", steps=1000, batch_size=4)
    taken: list[int] = []

    def time_step(self: LoraTrainer, rows: list[str]) -> StepTime:
        taken.append(len(rows))
        return StepTime(0.1 * len(rows), 0.1 * len(rows))

    monkeypatch.setattr(LoraTrainer, "time_step", time_step)
    found = estimate(plan, data("a", "b"), load_frozen_base(plan, "cpu", Progress()))
    assert taken[:5] == [2, 2, 2, 2, 4] and set(taken[4:]) == {4}, "a few samples first, then whole batches"
    assert found.step_s == pytest.approx(0.4) and found.measured_samples == 4 and 1 <= found.measured_steps <= 8
    assert found.at_least_s > 2 * 1000 * 0.4 and found.at_most_s > 3 * 1000 * 0.4
    assert found.at_most_s < 3 * 1000 * 0.4 * 1.5, "scoring and encoding a hundred small pictures takes little time"


def test_a_step_that_takes_long_is_measured_on_a_few_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made(tmp_path, "a", steps=10, batch_size=12)
    seconds = itertools.chain([90.0, 3.0], itertools.repeat(2.0))  # the first step of a process, then later ones
    monkeypatch.setattr(LoraTrainer, "time_step", lambda self, rows: StepTime(next(seconds), 1.0))
    found = estimate(plan, data("a"), load_frozen_base(plan, "cpu", Progress()))
    assert (found.measured_steps, found.measured_samples, found.step_s) == (1, 1, pytest.approx(24.0))


def test_the_time_that_a_plan_allows_bounds_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is processor time, of which a step on four cores takes four times its duration."""
    monkeypatch.setattr(LoraTrainer, "time_step", lambda self, rows: StepTime(1.0, 4.0))
    plan = made(tmp_path, "a", steps=10_000, batch_size=2, seconds=4000.0)
    found = estimate(plan, data("a"), load_frozen_base(plan, "cpu", Progress()))
    assert 1000 < found.at_most_s < 1500, "all steps would take 10,000 s"


def test_heads_that_train_by_themselves_have_their_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take no part in the batches of the LoRA."""
    seen: set[str] = set()

    def time_step(self: LoraTrainer, rows: list[str]) -> StepTime:
        seen.update(rows)
        return StepTime(0.1 * len(rows), 0.1)

    def time_head_step(self: LoraTrainer, domain: str, samples: int, steps: int) -> StepTime:
        assert domain == "squares" and samples == HEAD_SAMPLES * 4
        return StepTime(0.1, 0.1)

    squares = Splits("detection", ("square",), boxes(30, 0), boxes(10, 1), boxes(10, 2), real=False)
    both = {**data("a"), "squares": DomainData(squares)}
    plan = made(tmp_path, *both, steps=1000, batch_size=4)
    base = load_frozen_base(plan, "cpu", Progress())
    with monkeypatch.context() as patched:
        patched.setattr(LoraTrainer, "time_step", time_step)
        patched.setattr(LoraTrainer, "time_head_step", time_head_step)
        found = estimate(plan, both, base)
    assert seen == {"a"} and found.step_s == pytest.approx(0.4)
    assert found.at_least_s == pytest.approx(1000 * 0.4 + HEAD_STEPS * 1000 * 0.1, rel=0.1)
    only = plan.model_copy(update={"domains": plan.domains[1:]})
    found = estimate(only, {"squares": both["squares"]}, load_frozen_base(plan, "cpu", Progress()))
    assert found.batch_size == found.measured_samples == HEAD_SAMPLES * 4
    assert found.at_least_s > HEAD_STEPS * 1000 * found.step_s > 0


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
