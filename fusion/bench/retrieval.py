"""Data of `vlora bench retrieve`: an adapter for rendered streets, and held-back videos with queries about them.

The adapter answers "is there DESCRIPTION?" and captions pictures and clips in words. It has no head: the log
probability of "yes" ranks.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from transformers.utils.logging import disable_progress_bar

from fusion.bench.result_store import ResultStore
from fusion.data.samples import Sample, Splits
from fusion.embedded import checkpoint_path
from fusion.plan.schema import DomainPlan, LoraPlan, Plan, TrainingPlan
from fusion.synthetic.searched_videos import (
    PASSING_CAPTION,
    QUESTION,
    STREET_CAPTION,
    Query,
    ask_passing,
    ask_street,
    caption_passing,
    caption_street,
    render_passing,
    render_streets,
)
from fusion.training.domain import Domain
from fusion.training.frozen_base import FrozenBase
from fusion.training.trainer import LoraTrainer
from vlora.config import EngineConfig
from vlora.models import InputProcessor
from vlora.models.loading import load_model

ADAPTER = "streets"

_DRAWN: dict[str, tuple[str, str, Callable[[np.random.Generator], Sample]]] = {
    "street-questions": ("vqa", QUESTION, ask_street),
    "street-captions": ("captioning", STREET_CAPTION, caption_street),
    "passing-questions": ("vqa", QUESTION, ask_passing),
    "passing-captions": ("captioning", PASSING_CAPTION, caption_passing),
}
"""Domain -> task, question, and the function that draws a sample."""


class Collection(NamedTuple):
    """Videos of a folder that are searched together. num_frames: of the clip that the model reads. base_caption,
    caption: the questions that are asked of each clip for the index, of the base model and of the adapter.
    """

    name: str
    folder: str
    num_frames: int
    base_caption: str
    caption: str
    queries: list[Query]


class Prepared(NamedTuple):
    """base: the model's folder. adapters: the folder that contains the adapter. scores: of it, on test samples."""

    base: str
    adapters: str
    collections: list[Collection]
    scores: dict[str, float]
    training_cpu_s: float
    origin: dict[str, Any] | None = None


def prepare(
    quick: bool, folder: Path, say: Callable[[str], None], environment: Mapping[str, Any], seed: int = 0
) -> Prepared:
    """Train the adapter, and render the collections, in a folder from which a stopped benchmark continues.

    Args:
        quick: few samples, few steps and few videos: a smoke test without meaningful scores.
        folder: of this bench, or of its quick run: both write the same files.
        say: receives lines about progress.
        environment: of this run, as in `ResultStore`.
        seed: of the samples and the training.
    """
    found = ResultStore(folder, environment).once(
        f"prepared-{seed}", lambda: make_prepared(quick, folder, say, seed)._asdict()
    )
    return Prepared(**{**found, "collections": msgspec.convert(found["collections"], list[Collection])})


def make_prepared(quick: bool, folder: Path, say: Callable[[str], None], seed: int) -> Prepared:
    """As `prepare`, without the stored result."""
    adapters = folder / f"adapters-{seed}"
    scores, seconds = train(quick, adapters / ADAPTER, seed, say)
    num_videos = 2 if quick else 12
    collections = []
    for name, num_frames, base_caption, caption, render in (
        ("streets", 1, "describe the image.", STREET_CAPTION, render_streets),
        ("passing", 4, "describe the video.", PASSING_CAPTION, render_passing),
    ):
        videos = folder / f"{name}-{seed}"
        queries = render(videos, seed, num_videos)
        collections.append(Collection(name, str(videos), num_frames, base_caption, caption, queries))
        say(f"{name}: {num_videos} videos, {len(collections[-1].queries)} queries")
    return Prepared(checkpoint_path(), str(adapters), collections, scores, seconds)


def train(quick: bool, folder: Path, seed: int, say: Callable[[str], None]) -> tuple[dict[str, float], float]:
    """Train one adapter on all four domains at once and write it. Returns test scores and CPU seconds of training."""
    disable_progress_bar()
    warnings.simplefilter("ignore")  # deprecation notes of third-party libraries
    sizes, steps = ((60, 20, 20), 2) if quick else ((3000, 20, 200), 200)
    plan = Plan(
        seed=seed,
        lora=LoraPlan(rank=16, alpha=32),
        training=TrainingPlan(steps=steps, batch_size=32),
        domains=tuple(
            DomainPlan(name=name, source="made", question=question, threshold=0.5)
            for name, (_, question, _) in _DRAWN.items()
        ),
    )
    path = checkpoint_path()
    base = FrozenBase(load_model(EngineConfig(model=path, dtype="float32")), InputProcessor.from_pretrained(path))
    domains = {own.name: Domain(own, _splits(own.name, seed, sizes), base) for own in plan.domains}
    trainer = LoraTrainer(base, domains, plan)
    trainer.adapter.reset()
    began = time.process_time()
    trainer.train_together(tuple(domains))
    seconds = time.process_time() - began
    scores = {name: trainer.evaluator.score(name, domain.test) for name, domain in domains.items()}
    trainer.save(folder, trainer.adapter.snapshot())
    say(f"trained in {seconds:.0f} s of processor time: " + ", ".join(f"{k} {v:.3f}" for k, v in scores.items()))
    return scores, seconds


def _splits(name: str, seed: int, sizes: tuple[int, int, int]) -> Splits:
    task, _, draw = _DRAWN[name]
    rng = np.random.default_rng([seed, *name.encode()])
    train, validation, test = ([draw(rng) for _ in range(count)] for count in sizes)
    return Splits(task, (), train, validation, test, real=False)
