"""`vlora bench bd`: block-diagonal LoRA against LoRA with as many parameters (BD-LoRA section 5.1), an adapter for each
domain on the embedded model; and the trainers of other benchmarks.

A seed determines data, batches and initial factors, for every method the same. Scaling is rsLoRA's, as in the paper,
with an alpha that gives LoRA the scaling of the demonstration's plan.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, pstdev, stdev
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from fusion.block_diagonal.blocks import num_parameters
from fusion.data.samples import Splits
from fusion.embedded import checkpoint_path
from fusion.plan.schema import DomainPlan, LoraPlan, Plan, TrainingPlan
from fusion.synthetic.sources import load_source
from fusion.training.frozen_base import Domain, FrozenBase
from fusion.training.trainer import LoraTrainer
from vlora.bench.harness import Bench, Measured, Results
from vlora.bench.report import Goal
from vlora.config import EngineConfig
from vlora.models import InputProcessor
from vlora.models.loading import load_model


def plan_of(domains: Mapping[str, tuple[str, str]], seed: int, steps: int, batch: int, **settings: Any) -> Plan:
    """A plan of domains by name, each with its source and its question."""
    return Plan(
        seed=seed,
        training=TrainingPlan(steps=steps, batch_size=batch),
        domains=tuple(
            DomainPlan(name=name, source=source, question=question, threshold=0.5)
            for name, (source, question) in domains.items()
        ),
        **settings,
    )


def cut(splits: Splits, train: int, validation: int, test: int) -> Splits:
    """The first samples of each part."""
    return dataclasses.replace(
        splits, train=splits.train[:train], validation=splits.validation[:validation], test=splits.test[:test]
    )


def base_of() -> FrozenBase:
    """The embedded model."""
    disable_progress_bar()
    warnings.simplefilter("ignore")  # deprecation notes of third-party libraries
    path = checkpoint_path()
    processor = InputProcessor.from_pretrained(path)
    model = load_model(EngineConfig(model=path, dtype="float32"))
    return FrozenBase(model, processor)


def trainer_of(plan: Plan, base: FrozenBase, splits: Mapping[str, Splits]) -> LoraTrainer:
    domains = {own.name: Domain(own, splits[own.name], base) for own in plan.domains}
    for domain in domains.values():
        domain.encode()  # before any training is timed
    return LoraTrainer(base, domains, plan)


# -- block-diagonal adapters -------------------------------------------------------------------------------------------

BLOCKS = (1, 2, 4)
RANK, _ALPHA = 15, 8  # rank 22 in two blocks and rank 28 in four have as many parameters, within 1.1 %
_TOLERATED = 0.02  # fixed before any training
_DOMAINS = {
    "digits": ("sklearn-digits", "what digit is shown ?"),
    "photos": ("library-photos", "what does the photo show ?"),
    "signs": ("drawn-signs", "what sign is shown ?"),
}


def matched_rank(numbers: Callable[[LoraPlan], int], blocks: int) -> int:
    """The rank, a multiple of `blocks`, with the number of parameters closest to that of LoRA."""
    wanted = numbers(LoraPlan(rank=RANK))
    ranks = range(blocks, RANK * blocks + 1, blocks)
    return min(ranks, key=lambda rank: abs(numbers(LoraPlan(rank=rank, blocks=blocks)) - wanted))


def cases(quick: bool, seeds: int = 3) -> dict[str, tuple[int, int, bool]]:
    """Blocks and seed; quick: one seed, few samples and steps: scores mean nothing."""
    return {f"{blocks}-{seed}": (blocks, seed, quick) for seed in range(1 if quick else seeds) for blocks in BLOCKS}


def measure(case: tuple[int, int, bool]) -> Measured:
    blocks, seed, quick = case
    torch.set_num_threads(1)
    base = base_of()

    def numbers(lora: LoraPlan) -> int:
        return sum(num_parameters(lora, name, layer) for name, layer in base.hf_model.language_linears.items())

    lora = LoraPlan(rank=matched_rank(numbers, blocks), alpha=_ALPHA, rslora=True, blocks=blocks)
    plan = plan_of(_DOMAINS, seed, 4 if quick else 60, 16, lora=lora)
    sizes = (40, 20, 20) if quick else (600, 20, 400)
    trainer = trainer_of(plan, base, {name: cut(load_source(own[0], seed), *sizes) for name, own in _DOMAINS.items()})
    tested = {}
    for name, domain in trainer.domains.items():
        trainer.adapter.reset()
        trainer.train(name, ())
        tested[name] = trainer.evaluator.score(name, domain.test)
    counts = {name: len(domain.test) for name, domain in trainer.domains.items()}
    made = {"seed": seed, "blocks": blocks, "rank": lora.rank, "parameters": numbers(lora)}
    return Measured([], {**made, "num_test": counts, "test": tested})


def _name(blocks: int) -> str:
    return "LoRA" if blocks == 1 else f"BD-LoRA, {blocks} blocks"


def _means(runs: Sequence[Mapping[str, Any]], blocks: int) -> list[float]:
    return [mean(run["test"].values()) for run in runs if run["blocks"] == blocks]


def combine(results: Results) -> Measured:
    """Mean and spread (one standard deviation) over seeds; and the difference to LoRA per seed: its mean and standard
    error."""
    runs = [each.found for each in results.values()]
    rows, bounds = [], []
    plain = _means(runs, 1)
    for blocks in BLOCKS:
        own = [run for run in runs if run["blocks"] == blocks]
        row = {"method": _name(blocks), "rank": own[0]["rank"], "parameters": own[0]["parameters"]}
        for name in _DOMAINS:
            scores = [run["test"][name] for run in own]
            row |= {name: mean(scores), f"{name} +-": pstdev(scores)}
        means = _means(runs, blocks)
        behind = [found - lora for found, lora in zip(means, plain, strict=True)]
        error = stdev(behind) / len(behind) ** 0.5 if len(behind) > 1 else None
        row |= {"mean": mean(means), "mean +-": pstdev(means), "less LoRA": mean(behind), "standard error": error}
        rows.append(row)
        if blocks > 1:
            what = f"test accuracy, {_name(blocks)} less LoRA"
            bounds.append(Goal(what, mean(means) - mean(plain), -_TOLERATED, False))
    return Measured(rows, {"runs": runs}, bounds)


BENCH = Bench(name="bd", cases=cases, measure=measure, combine=combine, options=frozenset({"seeds"}), same=())
