"""Adapters of benchmarks on the embedded model: their plans and trainers, and block-diagonal LoRA with as many
parameters as LoRA (BD-LoRA section 5.1).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from transformers.utils.logging import disable_progress_bar

from fusion.block_diagonal.blocks import num_parameters
from fusion.data.samples import Splits
from fusion.embedded import checkpoint_path
from fusion.plan.schema import DomainPlan, LoraPlan, Plan, TrainingPlan
from fusion.synthetic.sources import load_source
from fusion.training.frozen_base import Domain, FrozenBase
from fusion.training.trainer import LoraTrainer
from vlora.config import EngineConfig
from vlora.models.loading import load_model
from vlora.models.processing import InputProcessor


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
    return dataclasses.replace(
        splits, train=splits.train[:train], validation=splits.validation[:validation], test=splits.test[:test]
    )


def base_of(features: Path | None = None) -> FrozenBase:
    """The embedded model. features: a folder that keeps features of pictures for later runs."""
    disable_progress_bar()
    warnings.simplefilter("ignore")  # deprecation notes of third-party libraries
    path = checkpoint_path()
    processor = InputProcessor.from_pretrained(path)
    model = load_model(EngineConfig(model=path, dtype="float32"))
    return FrozenBase(model, processor, features=features)


def trainer_of(plan: Plan, base: FrozenBase, splits: Mapping[str, Splits]) -> LoraTrainer:
    domains = {own.name: Domain(own, splits[own.name], base) for own in plan.domains}
    for domain in domains.values():
        domain.encode()  # before any training is timed
    return LoraTrainer(base, domains, plan)


# -- block-diagonal adapters -------------------------------------------------------------------------------------------

RANK, _ALPHA = 15, 8  # rank 22 in two blocks and rank 28 in four have as many parameters, within 1.1 %
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


def block_diagonal_score(blocks: int, quick: bool) -> float:
    """Mean test accuracy of an adapter for each domain. Scaling is rsLoRA's, as in the paper, with an alpha that gives
    LoRA the scaling of the demonstration's plan. quick: few samples and steps: scores mean nothing.
    """
    base = base_of()

    def numbers(lora: LoraPlan) -> int:
        return sum(num_parameters(lora, name, layer) for name, layer in base.hf_model.language_linears.items())

    lora = LoraPlan(rank=matched_rank(numbers, blocks), alpha=_ALPHA, rslora=True, blocks=blocks)
    plan = plan_of(_DOMAINS, 0, 4 if quick else 60, 16, lora=lora)
    sizes = (40, 20, 20) if quick else (600, 20, 400)
    trainer = trainer_of(plan, base, {name: cut(load_source(own[0], 0), *sizes) for name, own in _DOMAINS.items()})
    scores = []
    for name, domain in trainer.domains.items():
        trainer.adapter.reset()
        trainer.train(name, ())
        scores.append(trainer.evaluator.score(name, domain.test))
    return mean(scores)
