"""Heads of three tasks in one adapter with words: each is calibrated and served as trained, and the accuracy in words
of one domain is kept when tasks without words are added."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fusion.data.samples import Sample, Splits, Target
from fusion.plan.schema import DomainPlan, LoraPlan, Plan, TrainingPlan
from fusion.training.checkpoint import State
from fusion.training.domain import Domain
from fusion.training.frozen_base import FrozenBase
from fusion.training.trainer import LoraTrainer
from heads import Box, load_heads
from tests.fusion.small import ask_engine, value_of, write_base
from vlora.config import EngineConfig
from vlora.models import InputProcessor
from vlora.models.loading import load_model

pytestmark = pytest.mark.slow

COLORS = ("red", "green", "blue")


class Shown(NamedTuple):
    """A noise picture with a left or right half coloured to some degree."""

    color: int
    right: bool
    light: int

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        picture = rng.integers(0, 60, (96, 96, 3))
        picture[:, 48 * self.right : 48 + 48 * self.right, self.color] += self.light
        return picture.astype(np.uint8)


# Target answer of a picture by task, and its labels. Detection and regression have no words.
TARGETS: dict[str, tuple[tuple[str, ...], Callable[[Shown], Target]]] = {
    "classification": (COLORS, lambda shown: shown.color),
    "detection": (COLORS, lambda shown: (Box(shown.color, 0.5 * shown.right, 0, 0.5 + 0.5 * shown.right, 1),)),
    "regression": (("light",), lambda shown: (float(shown.light),)),
}


def samples(task: str, count: int, seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    drawn = [Shown(int(rng.integers(3)), bool(rng.integers(2)), int(rng.integers(80, 190))) for _ in range(count)]
    return [Sample((shown.draw(rng),), TARGETS[task][1](shown)) for shown in drawn]


class SharedAdapter(NamedTuple):
    """words: accuracy in words on the colour test samples, before and after the others are added. lora: the factors
    before and after detection is added."""

    trainer: LoraTrainer
    lora: tuple[State, State]
    words: tuple[float, float]
    losses: dict[str, tuple[float, float]]
    base: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SharedAdapter:
    folder = write_base(tmp_path_factory.mktemp("base"))
    torch.set_num_threads(1)
    plans = tuple(DomainPlan(name=task, source="made", question=f"{task} ?", threshold=0.5) for task in TARGETS)
    plan = Plan(
        base=folder,
        lora=LoraPlan(rank=8, alpha=16),
        training=TrainingPlan(steps=35, batch_size=12, rehearsal=0.5),
        domains=plans,
    )
    base = FrozenBase(load_model(EngineConfig(model=folder)), InputProcessor.from_pretrained(folder))
    domains = {}
    for own in plans:
        train, validation, test = (samples(own.name, count, seed) for seed, count in enumerate((60, 30, 30)))
        splits = Splits(own.name, TARGETS[own.name][0], train, validation, test, real=False)
        domains[own.name] = Domain(own, splits, base)
    trainer = LoraTrainer(base, domains, plan)
    trainer.adapter.reset()
    losses = {}
    held: list[str] = []
    before = 0.0
    lora: tuple[State, State] = ({}, {})
    for task in TARGETS:
        trainer.adapter.add_head(task)
        untrained = loss_of(trainer, task)
        before_it = trainer.adapter.snapshot()
        trainer.train(task, tuple(held))
        if task == "detection":
            lora = (before_it, trainer.adapter.snapshot())
        losses[task] = (untrained, loss_of(trainer, task))
        held.append(task)
        if task == "classification":
            before = trainer.evaluator.accuracy_in_words(task, domains[task].test)
    return SharedAdapter(
        trainer,
        lora,
        (before, trainer.evaluator.accuracy_in_words("classification", domains["classification"].test)),
        losses,
        folder,
    )


@torch.no_grad()
def loss_of(trainer: LoraTrainer, task: str) -> float:
    own = trainer.domains[task]
    ((part, outputs),) = trainer.evaluator.forward(task, own.test)
    return own.task.loss(outputs, trainer.adapter.heads[task], [sample.target for sample in part]).item()


def test_every_task_learns(trained: SharedAdapter) -> None:
    for task, (before, after) in trained.losses.items():
        assert after < 0.8 * before, task


def test_accuracy_in_words_holds_next_to_a_task_without_words(trained: SharedAdapter) -> None:
    before, after = trained.words
    assert before > 0.8  # otherwise nothing could be lost
    assert after >= before - 0.15


def test_a_head_over_features_of_pictures_changes_no_factor(trained: SharedAdapter) -> None:
    before, after = trained.lora
    factors = [name for name in before if name.startswith("lora.")]
    assert factors and all(torch.equal(before[name], after[name]) for name in factors)
    later = trained.trainer.adapter.snapshot()
    assert any(not torch.equal(later[name], after[name]) for name in factors), "a regression head does"
    ours = [name for name in after if name.startswith("head.detection.")]
    assert len(ours) == 4 and all(torch.equal(later[name], after[name]) for name in ours), "and leaves this head"


def test_without_rehearsal_accuracy_in_words_is_lost(trained: SharedAdapter) -> None:
    """Negative control for the test above: the same training without rehearsal of colours."""
    trainer = trained.trainer
    state = trainer.adapter.snapshot()
    plan = trainer.plan
    alone = plan.training.model_copy(update={"learning_rate": 0.02})
    trainer.plan = plan.model_copy(update={"training": alone})
    trainer.train("regression", ())
    forgotten = trainer.evaluator.accuracy_in_words("classification", trainer.domains["classification"].test)
    trainer.plan = plan
    trainer.adapter.restore(state)
    assert forgotten < trained.words[1] - 0.3


def test_heads_are_saved_and_served_with_their_calibration(trained: SharedAdapter, tmp_path: Path) -> None:
    trainer = trained.trainer
    trainer.save(tmp_path, trainer.adapter.snapshot())
    heads = load_heads(tmp_path)
    assert heads.keys() == TARGETS.keys()
    for head in heads.values():
        assert head.task.parameters.get("temperature") != 1.0  # a regression has none
    for task, domain in trainer.domains.items():
        outputs = ask_engine(trained.base, domain, tmp_path, head=task)
        found = [value_of(parts[-1].head) for parts in outputs]
        metrics = heads[task].task.metrics(found, [sample.target for sample in domain.splits.test])
        # Training evaluates in bfloat16 autocast, serving in float32: two samples may be answered differently.
        assert abs(metrics[domain.task.metric_name] - trainer.evaluator.score(task, domain.test)) < 2.1 / len(found)
