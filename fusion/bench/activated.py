"""`vlora bench activated`: activated adapters (aLoRA) against ordinary ones, on the domains of the small plan.

Each domain has an adapter of its own. Data, batches and initial factors are the same for every method.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from transformers.utils.logging import disable_progress_bar

from fusion.bench.result_store import ResultStore, origins
from fusion.embedded import checkpoint_path
from fusion.plan.plan_file import read_plan_file
from fusion.plan.schema import LoraPlan, Plan, TrainingPlan
from fusion.synthetic.sources import load_source
from fusion.training.activation import invocation_tokens
from fusion.training.domain import Domain
from fusion.training.frozen_base import FrozenBase
from fusion.training.trainer import LoraTrainer
from vlora.config import EngineConfig
from vlora.models import InputProcessor
from vlora.models.loading import load_model

METHODS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "activated at the question": {"activated": True, "invocation": "what"},  # all four begin with this word
    "activated at the answer": {"activated": True},
}
"""Settings of `lora` by method."""

_PLAN = Path(__file__).parents[1] / "plans" / "small.yaml"


class Activated(NamedTuple):
    """rows: the table, one row per method. runs: one entry per method and domain. origins: of all runs."""

    rows: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    origins: list[dict[str, Any]]


def compare_activated(
    quick: bool, folder: Path | None, say: Callable[[str], None], environment: Mapping[str, Any] | None = None
) -> Activated:
    """Train every domain with every method.

    Args:
        quick: few samples, few steps: a smoke test without meaningful scores.
        folder: for stored results, from which a stopped benchmark continues.
        say: receives lines about finished runs.
        environment: of this run, as in `ResultStore`.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return compare_activated(quick, Path(temporary), say, environment)
    store = ResultStore(folder, environment or {})
    runs = {}
    plan = read_plan_file(_PLAN).plan
    for domain in plan.domains:
        for number, method in enumerate(METHODS):
            name = f"{'quick-' if quick else ''}{domain.name}-{number}"
            run = runs[name] = store.once(name, functools.partial(measure, plan, domain.name, method, quick))
            say(f"{domain.name}, {method}: {run['test']:.3f}, {run['spent']['cpu s']:.0f} s of processor time")
    found = list(runs.values())
    return Activated(_rows(found), found, origins(runs))


def measure(small: Plan, name: str, method: str, quick: bool) -> dict[str, Any]:
    """Train one adapter and score it on test data."""
    disable_progress_bar()
    warnings.simplefilter("ignore")  # deprecation notes of third-party libraries
    torch.set_num_threads(1)
    started, cpu = time.perf_counter(), time.process_time()
    lora = LoraPlan(rank=small.lora.rank, alpha=small.lora.alpha, **METHODS[method])
    training = TrainingPlan(steps=4 if quick else 60, batch_size=16)
    plan = small.model_copy(update={"lora": lora, "training": training})
    path = checkpoint_path()
    processor = InputProcessor.from_pretrained(path)
    base = FrozenBase(
        load_model(EngineConfig(model=path, dtype="float32")), processor, invocation=invocation_tokens(lora, processor)
    )
    own = next(domain for domain in plan.domains if domain.name == name)
    assert own.source is not None, "all domains of the small plan are built in"
    splits = load_source(own.source, plan.seed)
    num_train, num_held = (40, 20) if quick else (600, 300)
    cut = {"train": num_train, "validation": num_held, "test": num_held}
    parts = {part: getattr(splits, part)[:count] for part, count in cut.items()}
    domain = Domain(own, dataclasses.replace(splits, **parts), base)
    trainer = LoraTrainer(base, {name: domain}, plan)
    trainer.adapter.reset()
    trainer.train(name, ())
    first = domain.test[0]
    return {
        "domain": name,
        "method": method,
        "test": trainer.evaluator.score(name, domain.test),
        "in words": trainer.evaluator.accuracy_in_words(name, domain.test),
        "num_test": len(domain.test),
        "prompt tokens": len(first.ids),
        "adapted tokens": len(first.ids) - (first.start or 0),
        "steps": training.steps,
        "spent": {"wall s": time.perf_counter() - started, "cpu s": time.process_time() - cpu},
    }


def _rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Test accuracy of heads and of words by domain, and their means."""
    rows = []
    for method in METHODS:
        own = [run for run in runs if run["method"] == method]
        row: dict[str, Any] = {"method": method}
        for run in own:
            row |= {run["domain"]: run["test"], f"{run['domain']} in words": run["in words"]}
        row |= {"mean": mean(run["test"] for run in own), "mean in words": mean(run["in words"] for run in own)}
        rows.append(row)
    return rows
