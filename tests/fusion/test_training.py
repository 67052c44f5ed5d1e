"""A small real run: the embedded architecture learns, PEFT can load the saved adapters, and serving gives the same
answers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from fusion.plan.schema import LoraPlan, TrainingPlan
from fusion.training.domain import Domain
from fusion.training.trainer import LoraTrainer
from tests.fusion.small import COLORS, StepsReported, ask_engine, color_splits, plan_of, texts_of, trainer_of
from vlora.types import SamplingParams


@pytest.fixture(scope="module")
def trained(base: str) -> tuple[LoraTrainer, Domain]:
    trainer = trainer_of(plan_of(base, ("colors",)), {"colors": color_splits()})
    trainer.adapter.reset()
    trainer.train("colors", ())
    return trainer, trainer.domains["colors"]


def test_training_beats_chance_by_far(trained: tuple[LoraTrainer, Domain]) -> None:
    trainer, domain = trained
    assert trainer.evaluator.score("colors", domain.test) > 0.8


def test_training_stops_when_its_time_is_up(
    trained: tuple[LoraTrainer, Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trained
    state, reported = trainer.adapter.snapshot(), StepsReported()
    hurried = TrainingPlan(steps=100_000, seconds=5, batch_size=4)
    monkeypatch.setattr(trainer, "plan", trainer.plan.model_copy(update={"training": hurried}))
    monkeypatch.setattr(trainer, "progress", reported)
    monkeypatch.setattr("time.process_time", itertools.count().__next__)
    trainer.train("colors", ())
    assert 3 <= reported.steps[-1] <= 6, "the clock moves on by a second per step"
    trainer.adapter.restore(state)


def test_a_restored_snapshot_has_the_same_accuracy(trained: tuple[LoraTrainer, Domain]) -> None:
    trainer, domain = trained
    state = trainer.adapter.snapshot()
    before = trainer.evaluator.score("colors", domain.test)
    trainer.adapter.reset()
    trainer.adapter.restore(state)
    assert trainer.evaluator.score("colors", domain.test) == before
    assert all(torch.equal(value, state[name]) for name, value in trainer.adapter.snapshot().items())


def test_accuracy_in_words_agrees_with_greedy_decoding(base: str, tmp_path: Path) -> None:
    """One forward over the correct answer agrees with the engine's token-by-token decoding."""
    plan = plan_of(base, ("colors",), lora=LoraPlan(rank=8, alpha=16), steps=60)
    trainer = trainer_of(plan, {"colors": color_splits().in_words()})
    domain = trainer.domains["colors"]
    trainer.adapter.reset()
    trainer.train("colors", ())
    trainer.save(tmp_path / "adapter", trainer.adapter.snapshot())
    outputs = ask_engine(base, domain, tmp_path / "adapter", sampling=SamplingParams(max_tokens=4))
    hits = sum(text == sample.target for text, sample in zip(texts_of(base, outputs), domain.splits.test, strict=True))
    count = len(domain.test)
    assert hits > 0.4 * count  # it has learned the words, so the comparison is meaningful
    assert abs(hits / count - trainer.evaluator.accuracy_in_words("colors", domain.test)) <= 1 / count + 1e-9


def test_the_saved_adapter_is_read_by_peft_and_served_the_same(
    trained: tuple[LoraTrainer, Domain], base: str, tmp_path: Path
) -> None:
    trainer, domain = trained
    trainer.save(tmp_path / "adapter", trainer.adapter.snapshot())
    PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), str(tmp_path / "adapter"))
    outputs = ask_engine(base, domain, tmp_path / "adapter", head="colors")
    answers = [parts[-1].head for parts in outputs]
    hits, count = 0, len(domain.test)
    for answer, sample in zip(answers, domain.splits.test, strict=True):
        assert answer is not None and isinstance(sample.target, int)
        hits += answer.label == COLORS[sample.target]
    # Training evaluates in bfloat16 autocast, serving in float32: one sample may be answered differently.
    assert abs(hits / count - trainer.evaluator.score("colors", domain.test)) <= 1 / count + 1e-9
