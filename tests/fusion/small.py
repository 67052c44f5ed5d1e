"""The embedded architecture at reduced size with random weights, and domains that it learns within a second."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration

from fusion.data.samples import Sample, Splits, Target
from fusion.embedded.drawing import SIZE
from fusion.plan.schema import DomainPlan, LoraPlan, Plan, TrainingPlan
from fusion.progress import Progress, ProgressCallback
from fusion.training.fingerprint import ALL, Inputs
from fusion.training.frozen_base import Domain, FrozenBase
from fusion.training.trainer import LoraTrainer
from heads import Box
from tools.embedded_model.model import model_config
from tools.embedded_model.processor import build_processor
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models.loading import load_model
from vlora.models.processing import InputProcessor
from vlora.types import HeadAnswer, Request, RequestOutput

COLORS = ("red", "green", "blue")


def inputs(*names: str, **shared: str) -> Inputs:
    """Of trainings that depend on nothing else than their domains."""
    return Inputs({ALL: shared, **{name: {} for name in names}}, *({name: {} for name in names} for _ in range(2)))


def build_small() -> LlavaForConditionalGeneration:
    """A quarter of the width and half of the depth: the tests check training, not final accuracy."""
    config = model_config()
    assert config.vision_config is not None and config.text_config is not None
    heads = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config.vision_config.update({**heads, "projection_dim": 64})
    config.text_config.update({**heads, "num_key_value_heads": 4, "head_dim": 16})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlavaForConditionalGeneration(config)


def write_base(folder: Path) -> str:
    build_small().save_pretrained(str(folder))
    build_processor().save_pretrained(str(folder))
    return str(folder)


def picture(label: int, rng: np.random.Generator) -> np.ndarray:
    """Noise with more of one colour."""
    pixels = rng.integers(0, 60, (96, 96, 3))
    pixels[..., label] += 160
    return pixels.astype(np.uint8)


def colors(count: int, seed: int, told: Mapping[int, int] | None = None) -> list[Sample]:
    """told: the label given to each colour; the correct one by default."""
    rng = np.random.default_rng(seed)
    labels = [int(rng.integers(3)) for _ in range(count)]
    return [Sample((picture(label, rng),), label if told is None else told[label]) for label in labels]


def color_splits(told: Mapping[int, int] | None = None, labels: tuple[str, ...] = COLORS) -> Splits:
    train, validation, test = (colors(count, seed, told) for seed, count in enumerate((60, 40, 30)))
    return Splits("classification", labels, train, validation, test, real=False)


def boxes(count: int, seed: int) -> list[Sample]:
    """One to three bright squares: the loss is a mean over the tokens with a square, not over samples."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        frame = rng.integers(0, 60, (SIZE, SIZE, 3)).astype(np.uint8)
        found = []
        for _ in range(int(rng.integers(1, 4))):
            x, y = (int(v) for v in rng.integers(0, SIZE - 16, 2))
            frame[y : y + 16, x : x + 16] = 250
            found.append(Box(0, x / SIZE, y / SIZE, (x + 16) / SIZE, (y + 16) / SIZE))
        samples.append(Sample((frame,), tuple(found)))
    return samples


def plan_of(base: str, names: tuple[str, ...], *, lora: LoraPlan | None = None, **training: object) -> Plan:
    settings = {"steps": 25, "batch_size": 12, **training}
    return Plan(
        base=base,
        lora=lora or LoraPlan(rank=4, alpha=8),
        confidence=None,
        training=TrainingPlan(**settings),  # type: ignore[arg-type]
        domains=tuple(
            DomainPlan(name=name, source="made", question="what color is the image ?", threshold=0.8) for name in names
        ),
    )


def trainer_of(
    plan: Plan, splits: Mapping[str, Splits], features: Path | None = None, progress: Progress | None = None
) -> LoraTrainer:
    model = load_model(EngineConfig(model=plan.base))
    processor = InputProcessor.from_pretrained(plan.base)
    base = FrozenBase(model, processor, features=features, train_vision=plan.lora.vision)
    domains = {domain.name: Domain(domain, splits[domain.name], base) for domain in plan.domains}
    return LoraTrainer(base, domains, plan, progress=progress)


class StepsReported(Progress):
    """Records the progress of trainings and shows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []
        self.steps: list[int] = []

    @contextlib.contextmanager
    def work(self, what: str, total: int, unit: str, *, trainings: int = 0) -> Iterator[ProgressCallback]:
        self.started.append(what)

        def update(done: int, facts: str = "", share: float | None = None) -> None:
            if trainings:
                self.steps.append(done)

        yield update


def write_folders(folder: Path, told: tuple[str, ...] = COLORS, by_chance: bool = False) -> Path:
    """The same pictures as an image folder, each with its colour's label or with a random one."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("validation", 6), ("test", 4)):
        for label, name in enumerate(told):
            (folder / part / name).mkdir(parents=True)
            for place in range(count):
                shown = picture(int(rng.integers(3)) if by_chance else label, rng)
                cv2.imwrite(str(folder / part / name / f"{place}.png"), shown[..., ::-1])
    return folder


def ask_engine(base: str, domain: Domain, adapter: Path | None = None, **fields: Any) -> list[list[RequestOutput]]:
    """The outputs of an engine in float32 for each test sample of a domain.

    Args:
        adapter: A folder to load; None: the base model answers.
        fields: Of the requests, for example `head`.
    """
    engine = LocalEngine(EngineConfig(model=base, dtype="float32", arena_bytes=64 * 2**20))
    if adapter is not None:
        engine.engine.load_adapter("own", str(adapter))
        fields = {"adapter": "own", **fields}
    processor = InputProcessor.from_pretrained(base)
    requests = []
    for number, sample in enumerate(domain.splits.test):
        prompt = processor.chat(sample.question or domain.plan.question, len(sample.frames))
        encoded = processor.encode(prompt, [Image.fromarray(frame) for frame in sample.frames])
        requests.append(Request(request_id=str(number), prompt_ids=encoded.prompt_ids, vision=encoded.vision, **fields))
    outputs = engine.run(requests)
    return [outputs[request.request_id] for request in requests]


def texts_of(base: str, outputs: Sequence[Sequence[RequestOutput]]) -> list[str]:
    """The answers in words of `ask_engine`."""
    processor = InputProcessor.from_pretrained(base)
    return [processor.decode([token for one in parts for token in one.token_ids]).strip() for parts in outputs]


def value_of(answer: HeadAnswer | None) -> Target:
    assert answer is not None
    match answer.task:
        case "detection":
            return tuple(Box(b.label_id, b.left, b.top, b.right, b.bottom, b.score, b.image) for b in answer.boxes)
        case "counting":
            assert answer.count is not None
            return answer.count
        case "multi_label":
            return answer.chosen
        case "regression":
            return answer.values
    assert answer.label_id is not None
    return answer.label_id
