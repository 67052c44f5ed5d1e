"""Time estimates of a plan, from measured steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fusion.data.load import DomainData
from fusion.data.samples import Splits
from fusion.plan.estimate import Estimate, estimate
from fusion.plan.tasks import HEAD_SAMPLES, HEAD_STEPS
from fusion.progress import Progress
from fusion.training.frozen_base import FrozenBase, load_frozen_base
from fusion.training.trainer import LoraTrainer, StepTime
from tests.fusion.small import boxes, color_splits, plan_of


@pytest.fixture(scope="module")
def frozen(base: str) -> FrozenBase:
    return load_frozen_base(plan_of(base, ("a",)), "cpu", Progress())


SQUARES = Splits("detection", ("square",), boxes(30, 0), boxes(10, 1), boxes(10, 2), real=False)


def estimated(frozen: FrozenBase, *names: str, **training: Any) -> Estimate:
    """Of a plan of these domains, each with colours, or with boxes if it is named squares."""
    plan = plan_of("x", names, **training)
    data = {name: DomainData(SQUARES if name == "squares" else color_splits(), None) for name in names}
    return estimate(plan, data, frozen)


def test_an_estimate_is_near_what_steps_take(frozen: FrozenBase, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def time_step(self: LoraTrainer, rows: list[str]) -> StepTime:
        taken.append(len(rows))
        return StepTime(0.1 * len(rows), 0.1 * len(rows))

    monkeypatch.setattr(LoraTrainer, "time_step", time_step)
    found = estimated(frozen, "a", "b", steps=1000, batch_size=4)
    assert taken[:5] == [2, 2, 2, 2, 4] and set(taken[4:]) == {4}, "a few samples first, then whole batches"
    assert found.step_s == pytest.approx(0.4) and found.measured_samples == 4 and 1 <= found.measured_steps <= 8
    assert found.at_least_s > 2 * 1000 * 0.4 and found.at_most_s > 3 * 1000 * 0.4
    assert found.at_most_s < 3 * 1000 * 0.4 * 1.5, "scoring and encoding a hundred small pictures takes little time"
    # A step that takes long is measured on a few samples: the first one of a process, then later ones.
    seconds = itertools.chain([90.0, 3.0], itertools.repeat(2.0))
    monkeypatch.setattr(LoraTrainer, "time_step", lambda self, rows: StepTime(next(seconds), 1.0))
    found = estimated(frozen, "a", steps=10, batch_size=12)
    assert (found.measured_steps, found.measured_samples, found.step_s) == (1, 1, pytest.approx(24.0))
    # The time that a plan allows is processor time, of which a step on four cores takes four times its duration.
    monkeypatch.setattr(LoraTrainer, "time_step", lambda self, rows: StepTime(1.0, 4.0))
    found = estimated(frozen, "a", steps=10_000, batch_size=2, seconds=4000.0)
    assert 1000 < found.at_most_s < 1500, "all steps would take 10,000 s"


def test_heads_that_train_by_themselves_have_their_own_steps(
    frozen: FrozenBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take no part in the batches of the LoRA. The second plan has real steps, and no others."""
    seen: set[str] = set()

    def time_step(self: LoraTrainer, rows: list[str]) -> StepTime:
        seen.update(rows)
        return StepTime(0.1 * len(rows), 0.1)

    def time_head_step(self: LoraTrainer, domain: str, samples: int, steps: int) -> StepTime:
        assert domain == "squares" and samples == HEAD_SAMPLES * 4
        return StepTime(0.1, 0.1)

    with monkeypatch.context() as patched:
        patched.setattr(LoraTrainer, "time_step", time_step)
        patched.setattr(LoraTrainer, "time_head_step", time_head_step)
        found = estimated(frozen, "a", "squares", steps=1000, batch_size=4)
    assert seen == {"a"} and found.step_s == pytest.approx(0.4)
    assert found.at_least_s == pytest.approx(1000 * 0.4 + HEAD_STEPS * 1000 * 0.1, rel=0.1)
    found = estimated(frozen, "squares", steps=1000, batch_size=4)
    assert found.batch_size == found.measured_samples == HEAD_SAMPLES * 4
    assert found.at_least_s > HEAD_STEPS * 1000 * found.step_s > 0
    found = estimated(frozen, "a", steps=3, batch_size=4)
    assert 0 < found.step_s < 60 and found.threads is not None
