"""Small models and the adapters that replace them: both trained on the same samples, by domain and seed.

Each seed draws its own data, initial factors and batches. Everything is stored, so that a stopped run continues and
latencies are measured with the trained models.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from fusion.bench.result_store import ResultStore
from fusion.data.samples import Splits, Target
from fusion.embedded import checkpoint_path
from fusion.plan.schema import DomainPlan, Plan, TrainingPlan
from fusion.rivals import RIVALS, SmallModel
from fusion.rivals.models import export
from fusion.synthetic.sources import load_source
from fusion.training.domain import Domain
from fusion.training.frozen_base import FrozenBase
from fusion.training.objectives import objective_of
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
    """Stored results of one seed. store: its folder has `NAME.onnx` and the adapter `NAME/` of each domain. results: by
    method.
    """

    store: ResultStore
    found: dict[str, Any]
    results: dict[str, dict[str, Any]]


def train_rivals(
    seed: int, quick: bool, folder: Path, say: Callable[[str], None], environment: Mapping[str, Any]
) -> Trained:
    """Train all small models, an adapter per domain, and one for all domains, and score them on test data.

    Args:
        quick: few samples, few steps: a smoke test without meaningful scores.
        folder: for stored results; those of an earlier run are read.
        say: receives lines about scores.
        environment: of this run, as in `ResultStore`.
    """
    store = ResultStore(folder / f"{'quick-' if quick else ''}{seed}", environment)
    results = {
        method: store.once(method, functools.partial(train_method, method, seed, quick, store.folder, say))
        for method in METHODS
    }
    found: dict[str, Any] = {"seed": seed}
    for method, result in results.items():
        for key, value in result.items():
            if key != "origin":
                found.setdefault(key, {})[method] = value
    shutil.rmtree(store.folder / "features", ignore_errors=True)
    return Trained(store, found, results)


def train_method(method: str, seed: int, quick: bool, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Train and score one of METHODS."""
    disable_progress_bar()
    warnings.simplefilter("ignore")  # deprecation notes of third-party libraries
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    job = _Job(seed, quick, folder, splits_of(seed, quick), say)
    return job.small_models() if method == SMALL else job.adapters(fused=method == FUSED)


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


@dataclasses.dataclass(frozen=True)
class _Job:
    """The trainings of one seed."""

    seed: int
    quick: bool
    folder: Path
    splits: dict[str, Splits]
    say: Callable[[str], None]

    def small_models(self) -> dict[str, Any]:
        scores = {}
        for name, own in self.splits.items():
            rival, file = RIVALS[DOMAINS[name][0]], self.folder / f"{name}.onnx"
            began = time.process_time()
            model = rival.train(own, self.seed, steps=3 if self.quick else None)
            spent = time.process_time() - began
            export(model, own, file)
            scored = self._score(SMALL, name, SmallModel(file, own, threads=1).answers(own.test))
            size = {"parameters": sum(p.numel() for p in model.parameters()), "bytes": file.stat().st_size}
            scores[name] = {**scored, "training cpu s": spent, **size}
        return _by_value(scores)

    def adapters(self, *, fused: bool) -> dict[str, Any]:
        """An adapter per domain, which is saved, or one for all domains."""
        plan = Plan(
            seed=self.seed,
            training=TrainingPlan(steps=3 if self.quick else _STEPS, batch_size=_BATCH),
            domains=tuple(
                DomainPlan(name=name, source=source, question=question, threshold=0.5)
                for name, (source, question) in DOMAINS.items()
            ),
        )
        path = checkpoint_path()
        model, processor = load_model(EngineConfig(model=path, dtype="float32")), InputProcessor.from_pretrained(path)
        base = FrozenBase(model, processor, features=self.folder / "features")
        domains = {own.name: Domain(own, self.splits[own.name], base) for own in plan.domains}
        trainer = LoraTrainer(base, domains, plan)
        parameters = sum(p.numel() for p in trainer.adapter.lora.values())
        scores = {}
        for names in [tuple(domains)] if fused else [(name,) for name in domains]:
            trainer.adapter.reset()
            began = time.process_time()
            trainer.train_together(names)
            spent = (time.process_time() - began) / len(names)
            for name in names:
                scored = self._score(
                    FUSED if fused else ALONE, name, trainer.evaluator.answers(name, domains[name].test)
                )
                scores[name] = {**scored, "training cpu s": spent, "parameters": parameters}
            if not fused:
                trainer.save(self.folder / names[0], trainer.adapter.snapshot())
        return _by_value(scores)

    def _score(self, method: str, name: str, answers: Sequence[object]) -> dict[str, Any]:
        own = self.splits[name]
        objective, targets = objective_of(own), [sample.target for sample in own.test]
        score = objective.metric(answers, targets)
        self.say(f"seed {self.seed}, {name}, {method}: {score:.3f}")
        return {
            "metric": objective.metric_name,
            "num_test": len(targets),
            "test": score,
            "standard error": _standard_error(objective.metric, answers, targets),
        }


def _by_value(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{domain: {value: x}} as {value: {domain: x}}."""
    keys = next(iter(scores.values()))
    return {key: {name: own[key] for name, own in scores.items()} for key in keys}


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
