"""A small real run: the embedded architecture learns, PEFT can load the saved adapters, and serving gives the same
answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image

from fusion.data.samples import Sample, Splits
from fusion.plan.schema import DomainPlan, LoraPlan, Plan, TrainingPlan
from fusion.training.domain import Domain
from fusion.training.frozen_base import FrozenBase
from fusion.training.trainer import LoraTrainer
from tests.fusion.small import write_base
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models import InputProcessor
from vlora.models.loading import load_model
from vlora.types import Request, SamplingParams

pytestmark = pytest.mark.slow

LABELS = ("red", "green", "blue")


def colors(count: int, seed: int) -> list[Sample]:
    """Plain coloured pictures with noise: learnable from random features within seconds."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        label = int(rng.integers(3))
        picture = rng.integers(0, 60, (96, 96, 3))
        picture[..., label] += 160
        samples.append(Sample((picture.astype(np.uint8),), label))
    return samples


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trained(base_folder: str) -> tuple[LoraTrainer, Domain]:
    plan = Plan(
        base=base_folder,
        lora=LoraPlan(rank=4, alpha=8),
        training=TrainingPlan(steps=25, batch_size=12),
        domains=(DomainPlan(name="colors", source="made", question="what color is the image ?", threshold=0.9),),
    )
    torch.set_num_threads(1)
    config = EngineConfig(model=base_folder)
    base = FrozenBase(load_model(config), InputProcessor.from_pretrained(base_folder))
    splits = Splits("classification", LABELS, colors(60, 0), colors(30, 1), colors(30, 2), real=False)
    domain = Domain(plan.domains[0], splits, base)
    trainer = LoraTrainer(base, {"colors": domain}, plan)
    trainer.adapter.reset()
    trainer.train("colors", ())
    return trainer, domain


def test_training_beats_chance_by_far(trained: tuple[LoraTrainer, Domain]) -> None:
    trainer, domain = trained
    assert trainer.evaluator.score("colors", domain.test) > 0.8


def test_training_stops_when_its_time_is_up(
    trained: tuple[LoraTrainer, Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trained
    state = trainer.adapter.snapshot()
    hurried = TrainingPlan(steps=100_000, seconds=0.5, batch_size=4)
    monkeypatch.setattr(trainer, "plan", trainer.plan.model_copy(update={"training": hurried}))
    started = time.process_time()
    trainer.train("colors", ())
    assert time.process_time() - started < 5
    trainer.adapter.restore(state)


def test_a_restored_snapshot_has_the_same_accuracy(trained: tuple[LoraTrainer, Domain]) -> None:
    trainer, domain = trained
    state = trainer.adapter.snapshot()
    before = trainer.evaluator.score("colors", domain.test)
    trainer.adapter.reset()
    trainer.adapter.restore(state)
    assert trainer.evaluator.score("colors", domain.test) == before
    assert all(torch.equal(value, state[name]) for name, value in trainer.adapter.snapshot().items())


def test_accuracy_in_words_agrees_with_greedy_decoding(base_folder: str, tmp_path: Path) -> None:
    """One forward over the correct answer agrees with the engine's token-by-token decoding."""
    question = DomainPlan(name="colors", source="made", question="what color is the image ?", threshold=0.9)
    plan = Plan(
        base=base_folder,
        lora=LoraPlan(rank=8, alpha=16),
        training=TrainingPlan(steps=60, batch_size=12),
        domains=(question,),
    )
    parts = (
        [Sample(s.frames, LABELS[cast(int, s.target)]) for s in colors(count, seed)]
        for seed, count in enumerate((60, 6, 30))
    )
    train, validation, test = parts
    splits = Splits("vqa", (), train, validation, test, real=False)
    base = FrozenBase(load_model(EngineConfig(model=base_folder)), InputProcessor.from_pretrained(base_folder))
    domain = Domain(question, splits, base)
    trainer = LoraTrainer(base, {"colors": domain}, plan)
    trainer.adapter.reset()
    trainer.train("colors", ())
    trainer.save(tmp_path / "adapter", trainer.adapter.snapshot())
    engine = LocalEngine(EngineConfig(model=base_folder, arena_bytes=64 * 2**20))
    engine.engine.load_adapter("colors", str(tmp_path / "adapter"))
    processor = InputProcessor.from_pretrained(base_folder)
    requests = []
    for number, sample in enumerate(domain.splits.test):
        encoded = processor.encode(processor.chat(domain.plan.question, 1), [Image.fromarray(sample.frames[0])])
        requests.append(
            Request(
                request_id=str(number),
                prompt_ids=encoded.prompt_ids,
                vision=encoded.vision,
                adapter="colors",
                sampling=SamplingParams(max_tokens=4),
            )
        )
    outputs = engine.run(requests)
    hits = 0
    for number, sample in enumerate(domain.splits.test):
        text = processor.decode([token for output in outputs[str(number)] for token in output.token_ids])
        hits += text.strip() == sample.target
    assert hits > 0.4 * len(domain.test)  # it has learned the words, so the comparison is meaningful
    assert (
        abs(hits / len(domain.test) - trainer.evaluator.accuracy_in_words("colors", domain.test))
        <= 1 / len(domain.test) + 1e-9
    )


def test_the_saved_adapter_is_read_by_peft_and_served_the_same(
    trained: tuple[LoraTrainer, Domain], base_folder: str, tmp_path: Path
) -> None:
    trainer, domain = trained
    trainer.save(tmp_path / "adapter", trainer.adapter.snapshot())
    from transformers import AutoModelForImageTextToText

    PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base_folder), str(tmp_path / "adapter"))
    engine = LocalEngine(EngineConfig(model=base_folder, arena_bytes=64 * 2**20))
    engine.engine.load_adapter("colors", str(tmp_path / "adapter"))
    processor = InputProcessor.from_pretrained(base_folder)
    prompt = processor.chat(domain.plan.question, 1)
    requests = []
    for number, sample in enumerate(domain.splits.test):
        encoded = processor.encode(prompt, [Image.fromarray(sample.frames[0])])
        requests.append(
            Request(
                request_id=str(number),
                prompt_ids=encoded.prompt_ids,
                vision=encoded.vision,
                adapter="colors",
                head="colors",
            )
        )
    outputs = engine.run(requests)
    hits = 0
    for number, sample in enumerate(domain.splits.test):
        answer = outputs[str(number)][-1].head
        assert answer is not None
        hits += answer.label == LABELS[cast(int, sample.target)]
    # Training evaluates in bfloat16 autocast, serving in float32: one sample may be answered differently.
    assert abs(hits / len(domain.test) - trainer.evaluator.score("colors", domain.test)) <= 1 / len(domain.test) + 1e-9
