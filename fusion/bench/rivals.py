"""Small models and the adapters that replace them: both trained on the same samples, by domain and seed.

Each seed draws its own data, initial factors and batches. Everything is stored, so that a stopped run continues and
latencies are measured with the trained models.
"""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from fusion.data.samples import Splits, Target
from fusion.embedded import checkpoint_path
from fusion.plan.schema import DomainPlan, Plan, TrainingPlan
from fusion.rivals import RIVALS, SmallModel
from fusion.rivals.models import export
from fusion.synthetic.sources import load_source
from fusion.training.domain import Domain
from fusion.training.frozen_base import FrozenBase
from fusion.training.trainer import LoraTrainer
from vlora.config import EngineConfig
from vlora.models import InputProcessor
from vlora.models.loading import load_model

DOMAINS: dict[str, tuple[str, str]] = {
    "detection": ("drawn-traffic-detection", "what is on the road ?"),
    "signs": ("drawn-signs", "what sign is shown ?"),
    "counts": ("drawn-traffic-counts", "how many vehicles are on the road ?"),
    "actions": ("drawn-short-actions", "what happens in the video ?"),
}
"""Source and question, as in `vlora fuse demo`."""

SMALL, ALONE, FUSED = "small model", "adapter of its own", "fused adapter"
METHODS = (SMALL, ALONE, FUSED)
_STEPS, _BATCH = 150, 16
_NUM_TRAIN, _NUM_VALIDATION, _NUM_TEST = 960, 64, 400
_RESAMPLES = 100


class Trained(NamedTuple):
    """Stored results of one seed. folder: with `NAME.onnx` and `NAME/` for each domain."""

    folder: Path
    found: dict[str, Any]


def train_rivals(seed: int, quick: bool, folder: Path, say: Callable[[str], None]) -> Trained:
    """Train all small models, an adapter per domain, and one for all domains, and score them on test data.

    Args:
        quick: few samples, few steps: a smoke test without meaningful scores.
        folder: for stored results; of an earlier run, they are read.
    """
    folder = folder / f"{'quick-' if quick else ''}{seed}"
    result = folder / "scores.json"
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = result.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(_measure(seed, quick, folder, say)) + "\n")
        unfinished.replace(result)
    return Trained(folder, json.loads(result.read_text()))


def splits_of(seed: int, quick: bool) -> dict[str, Splits]:
    """The samples of all domains."""
    train, validation, test = (64, 16, 24) if quick else (_NUM_TRAIN, _NUM_VALIDATION, _NUM_TEST)
    found = {}
    for name, (source, _) in DOMAINS.items():
        own = load_source(source, seed)
        found[name] = dataclasses.replace(
            own, train=own.train[:train], validation=own.validation[:validation], test=own.test[:test]
        )
    return found


def _measure(seed: int, quick: bool, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    disable_progress_bar()
    warnings.simplefilter("ignore")  # deprecation notes of third-party libraries
    torch.set_num_threads(1)
    splits = splits_of(seed, quick)
    plan = Plan(
        seed=seed,
        training=TrainingPlan(steps=3 if quick else _STEPS, batch_size=_BATCH),
        domains=tuple(
            DomainPlan(name=name, source=source, question=question, threshold=0.5)
            for name, (source, question) in DOMAINS.items()
        ),
    )
    path = checkpoint_path()
    base = FrozenBase(
        load_model(EngineConfig(model=path, dtype="float32")),
        InputProcessor.from_pretrained(path),
        features=folder / "features",
    )
    domains = {own.name: Domain(own, splits[own.name], base) for own in plan.domains}
    scores: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    spent: dict[str, dict[str, float]] = {}

    def score(method: str, name: str, answers: Sequence[object]) -> None:
        targets = [sample.target for sample in splits[name].test]
        metric = domains[name].task.metric
        scores.setdefault(method, {})[name] = metric(answers, targets)
        errors.setdefault(method, {})[name] = _standard_error(metric, answers, targets)
        say(f"seed {seed}, {name}, {method}: {scores[method][name]:.3f}")

    def timed(method: str, name: str, train: Callable[[], object]) -> None:
        began = time.process_time()
        train()
        spent.setdefault(method, {})[name] = time.process_time() - began

    sizes: dict[str, Mapping[str, float]] = {}
    for name in domains:
        small: list[Any] = []
        rival, file = RIVALS[DOMAINS[name][0]], folder / f"{name}.onnx"
        timed(SMALL, name, lambda: small.append(rival.train(splits[name], seed, steps=3 if quick else None)))  # noqa: B023
        export(small[0], splits[name], file)
        score(SMALL, name, SmallModel(file, splits[name], threads=1).answers(splits[name].test))
        sizes[name] = {"parameters": sum(p.numel() for p in small[0].parameters()), "bytes": file.stat().st_size}
    trainer = LoraTrainer(base, domains, plan)
    for name, domain in domains.items():
        trainer.adapter.reset()
        timed(ALONE, name, lambda: trainer.train(name, ()))  # noqa: B023
        score(ALONE, name, trainer.evaluator.answers(name, domain.test))
        trainer.save(folder / name, trainer.adapter.snapshot())
    trainer.adapter.reset()
    timed(FUSED, "all", lambda: trainer.train_together(tuple(domains)))
    for name, domain in domains.items():
        score(FUSED, name, trainer.evaluator.answers(name, domain.test))
    return {
        "seed": seed,
        "metric": {name: domain.task.metric_name for name, domain in domains.items()},
        "num_train": {name: len(domain.train) for name, domain in domains.items()},
        "num_test": {name: len(domain.test) for name, domain in domains.items()},
        "test": scores,
        "standard error": errors,
        "training cpu s": spent,
        "small model": sizes,
        "adapter parameters": sum(p.numel() for p in trainer.adapter.lora.values()),
    }


def _standard_error(
    metric: Callable[[Sequence[object], Sequence[Target]], float], answers: Sequence[object], targets: Sequence[Target]
) -> float:
    """Of a score, by resampling the test samples (bootstrap)."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(_RESAMPLES):
        rows = rng.integers(len(targets), size=len(targets))
        found.append(metric([answers[row] for row in rows], [targets[row] for row in rows]))
    return float(np.std(found))
