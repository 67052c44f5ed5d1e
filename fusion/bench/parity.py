"""`vlora bench bd`: block-diagonal LoRA against LoRA with as many parameters (BD-LoRA section 5.1), on the embedded
model.

Each seed determines data, batches and initial factors, which are the same for every method. Scaling is rsLoRA's, as in
the paper, with an alpha that gives LoRA the scaling of the demonstration's plan.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev, stdev
from typing import Any, NamedTuple

import torch
from transformers.utils.logging import disable_progress_bar

from fusion.bench.jobs import JobGoal
from fusion.bench.result_store import ResultStore, origins
from fusion.block_diagonal.blocks import num_parameters
from fusion.embedded import checkpoint_path
from fusion.plan.schema import DomainPlan, LoraPlan, Plan, TrainingPlan
from fusion.synthetic.sources import load_source
from fusion.training.domain import Domain
from fusion.training.frozen_base import FrozenBase
from fusion.training.trainer import LoraTrainer
from vlora.config import EngineConfig
from vlora.models import InputProcessor
from vlora.models.loading import load_model

BLOCKS = (1, 2, 4)
NUM_SEEDS = 3
RANK, _ALPHA = 15, 8  # rank 22 in two blocks and rank 28 in four have as many parameters, within 1.1 %
_TOLERATED = 0.02  # fixed before any training
_DOMAINS = {
    "digits": ("sklearn-digits", "what digit is shown ?"),
    "photos": ("library-photos", "what does the photo show ?"),
    "signs": ("drawn-signs", "what sign is shown ?"),
}


class Parity(NamedTuple):
    """rows: the table, one row per method. runs: test accuracy by domain, one entry per method and seed. origins: of
    all runs.
    """

    rows: list[dict[str, Any]]
    goals: list[JobGoal]
    runs: list[dict[str, Any]]
    origins: list[dict[str, Any]]


def compare(
    quick: bool,
    folder: Path | None,
    say: Callable[[str], None],
    num_seeds: int = NUM_SEEDS,
    environment: Mapping[str, Any] | None = None,
) -> Parity:
    """Train every method for every seed.

    Args:
        quick: a single seed, few samples, few steps: a smoke test without meaningful scores.
        folder: for stored results, so that a stopped benchmark can be resumed or extended with more seeds.
        say: receives lines about finished runs.
        num_seeds: of each method.
        environment: of this run, as in `ResultStore`.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return compare(quick, Path(temporary), say, num_seeds, environment)
    store = ResultStore(folder, environment or {})
    runs = {}
    for seed in range(1 if quick else num_seeds):
        for blocks in BLOCKS:
            name = f"{'quick-' if quick else ''}{blocks}-{seed}"
            measuring = functools.partial(measure, seed, blocks, quick, folder / "features")
            runs[name] = store.once(name, measuring)
            say(f"{_name(blocks)}, seed {seed}: {runs[name]['spent']['cpu s']:.0f} s of processor time")
    shutil.rmtree(folder / "features", ignore_errors=True)  # much larger than the results, and quickly recomputed
    found = list(runs.values())
    return Parity(_rows(found), _goals(found), found, origins(runs))


def matched_rank(numbers: Callable[[LoraPlan], int], blocks: int) -> int:
    """The rank, a multiple of `blocks`, with the number of parameters closest to that of LoRA."""
    wanted = numbers(LoraPlan(rank=RANK))
    ranks = range(blocks, RANK * blocks + 1, blocks)
    return min(ranks, key=lambda rank: abs(numbers(LoraPlan(rank=rank, blocks=blocks)) - wanted))


def measure(seed: int, blocks: int, quick: bool, features: Path) -> dict[str, Any]:
    """Run one method with one seed: an adapter for each domain, and its score on test data."""
    disable_progress_bar()
    warnings.simplefilter("ignore")  # deprecation notes of third-party libraries
    torch.set_num_threads(1)
    started, cpu = time.perf_counter(), time.process_time()
    path = checkpoint_path()
    model = load_model(EngineConfig(model=path, dtype="float32"))
    base = FrozenBase(model, InputProcessor.from_pretrained(path), features=features)

    def numbers(lora: LoraPlan) -> int:
        return sum(num_parameters(lora, name, layer) for name, layer in base.hf_model.language_linears.items())

    lora = LoraPlan(rank=matched_rank(numbers, blocks), alpha=_ALPHA, rslora=True, blocks=blocks)
    plan = Plan(
        seed=seed,
        lora=lora,
        training=TrainingPlan(steps=4 if quick else 60, batch_size=16),
        domains=tuple(
            DomainPlan(name=name, source=source, question=question, threshold=0.5)
            for name, (source, question) in _DOMAINS.items()
        ),
    )
    num_train, num_test = (40, 20) if quick else (600, 400)
    domains = {}
    for own in plan.domains:
        splits = load_source(_DOMAINS[own.name][0], seed)
        cut = dataclasses.replace(
            splits, train=splits.train[:num_train], validation=splits.validation[:20], test=splits.test[:num_test]
        )
        domains[own.name] = Domain(own, cut, base)
    trainer = LoraTrainer(base, domains, plan)
    tested = {}
    for name, domain in domains.items():
        trainer.adapter.reset()
        trainer.train(name, ())
        tested[name] = trainer.evaluator.score(name, domain.test)
    return {
        "seed": seed,
        "blocks": blocks,
        "rank": lora.rank,
        "parameters": numbers(lora),
        "num_test": {name: len(domain.test) for name, domain in domains.items()},
        "test": tested,
        "spent": {"wall s": time.perf_counter() - started, "cpu s": time.process_time() - cpu},
    }


def _name(blocks: int) -> str:
    return "LoRA" if blocks == 1 else f"BD-LoRA, {blocks} blocks"


def _rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread (one standard deviation) over seeds; and the difference to LoRA per seed: its mean and standard
    error."""
    rows = []
    plain = _means([run for run in runs if run["blocks"] == 1])
    for blocks in BLOCKS:
        own = [run for run in runs if run["blocks"] == blocks]
        row = {"method": _name(blocks), "rank": own[0]["rank"], "parameters": own[0]["parameters"]}
        for name in _DOMAINS:
            scores = [run["test"][name] for run in own]
            row |= {name: mean(scores), f"{name} +-": pstdev(scores)}
        behind = [found - lora for found, lora in zip(_means(own), plain, strict=True)]
        error = stdev(behind) / len(behind) ** 0.5 if len(behind) > 1 else None
        row |= {"mean": mean(_means(own)), "mean +-": pstdev(_means(own))}
        rows.append({**row, "less LoRA": mean(behind), "standard error": error})
    return rows


def _means(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [mean(run["test"].values()) for run in runs]


def _goals(runs: Sequence[dict[str, Any]]) -> list[JobGoal]:
    plain = mean(_means([run for run in runs if run["blocks"] == 1]))
    return [
        JobGoal(
            f"test accuracy, {_name(blocks)} less LoRA",
            mean(_means([run for run in runs if run["blocks"] == blocks])) - plain,
            -_TOLERATED,
            at_most=False,
        )
        for blocks in BLOCKS[1:]
    ]
