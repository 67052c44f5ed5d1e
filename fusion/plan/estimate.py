"""Time estimate of a plan's run on this machine, from a few real training steps."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from fusion.data.load import DomainData
from fusion.packing.training_counts import max_trainings, min_trainings, trained_alone
from fusion.plan.schema import Plan
from fusion.training.domain import Domain
from fusion.training.frozen_base import FrozenBase
from fusion.training.trainer import LoraTrainer
from fusion.training.zero_shot import MAX_SAMPLES, answers_before_training

_BUDGET_S = 4.0  # for measured steps of a whole batch
_MOST_STEPS = 8
_TRIES = 3  # steps of few samples; the fastest counts, since other processes may slow one down


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Approximate duration of a run in seconds.

    at_least_s: if every domain fits where it is tried first. at_most_s: if no domain fits anywhere. step_s: duration of
    one step of batch_size samples. measured_steps: number of steps that step_s is the mean of. measured_samples:
    samples per measured step; fewer than batch_size if a full step takes too long to measure. threads: None on a GPU.
    """

    at_least_s: float
    at_most_s: float
    step_s: float
    batch_size: int
    measured_steps: int
    measured_samples: int
    device: str
    threads: int | None


class _Rates(NamedTuple):
    """Seconds per sample, by domain: encoding its pictures, scoring it, and asking the base model about it."""

    encode: Mapping[str, float]
    score: Mapping[str, float]
    ask: Mapping[str, float]


def estimate(plan: Plan, data: Mapping[str, DomainData], base: FrozenBase) -> Estimate:
    """Measure training steps at the plan's batch shape, and encoding and scoring of a few samples of each domain.

    The first steps have one sample of each domain. If they predict that a step of the whole batch takes seconds, the
    whole batch is not measured, so an estimate takes a few seconds besides loading the model, whatever its size.

    Args:
        base: the plan's base model, to which an adapter is added.

    Raises:
        BadPlan: a sample cannot be encoded for the base model.
    """
    rows = list(itertools.islice(itertools.cycle(data), plan.training.batch_size))
    rates, domains = _encode_few(plan, data, base, 1)
    trainer = LoraTrainer(base, domains, plan)
    few = rows[: len(data)]
    with base.progress.work("measuring steps", _MOST_STEPS, "steps") as update:
        trainer.time_step(few)  # the first step of a process is slower than later ones
        tried: list[float] = []
        while len(tried) < _TRIES and sum(tried) < _BUDGET_S:
            tried.append(trainer.time_step(few))
        measured, samples = [min(tried)], len(few)
        expected = measured[0] * len(rows) / samples + sum(rates[name] for name in rows)
        if expected < _BUDGET_S:
            rates, domains = _encode_few(plan, data, base, math.ceil(len(rows) / len(data)))
            trainer.domains.update(domains)
            measured, samples = [], len(rows)
            while not measured or (len(measured) < _MOST_STEPS and sum(measured) + measured[-1] < _BUDGET_S):
                measured.append(trainer.time_step(rows))
                update(len(measured))
    step_s = sum(measured) / len(measured) * len(rows) / samples
    score = {name: _score_s_per_sample(trainer, name) for name in trainer.domains}
    ask = {name: _decode_s_per_sample(domain) for name, domain in trainer.domains.items()}
    once, one = _run_s(plan, data, step_s, _Rates(rates, score, ask))
    teacher_scores = {name: own.teacher_score for name, own in data.items() if own.teacher_score is not None}
    alone = trained_alone(plan, teacher_scores)
    return Estimate(
        at_least_s=once + one * min_trainings(plan, alone),
        at_most_s=once + one * max_trainings(plan, alone),
        step_s=step_s,
        batch_size=len(rows),
        measured_steps=len(measured),
        measured_samples=samples,
        device=base.hf_model.device.type,
        threads=torch.get_num_threads() if base.hf_model.device.type == "cpu" else None,
    )


def _run_s(plan: Plan, data: Mapping[str, DomainData], step_s: float, rates: _Rates) -> tuple[float, float]:
    """Seconds of the work that a run does once, and of one training of one domain including its scoring."""
    once, validation = 0.0, 0.0
    for name, own in data.items():
        splits = own.splits
        if not plan.lora.vision:  # else every step encodes its own pictures
            once += rates.encode[name] * sum(map(len, splits.parts.values()))
        once += rates.ask[name] * min(MAX_SAMPLES, len(splits.test)) + rates.score[name] * len(splits.test)
        validation += rates.score[name] * len(splits.validation) / len(data)
    training = plan.training.steps * step_s
    if plan.training.seconds is not None:
        training = min(training, plan.training.seconds)
    # In sequence, an adapter holds half of the domains on average and all are scored; jointly, each is scored once.
    scored = 1.0 if plan.packing in ("guided", "jointly") else (len(data) + 1) / 2
    return once, training + validation * scored


def _encode_few(
    plan: Plan, data: Mapping[str, DomainData], base: FrozenBase, most: int
) -> tuple[dict[str, float], dict[str, Domain]]:
    """Encode the first `most` samples of each part of each domain; also return the seconds per sample."""
    rates, domains = {}, {}
    for domain in plan.domains:
        began = time.perf_counter()
        made = domains[domain.name] = Domain(domain, data[domain.name].splits, base, most=most)
        count = len(made.train) + len(made.validation) + len(made.test)
        rates[domain.name] = (time.perf_counter() - began) / count
    return rates, domains


def _score_s_per_sample(trainer: LoraTrainer, name: str) -> float:
    """Seconds to score a sample: one forward, or decoding an answer if the metric compares texts."""
    samples = trainer.domains[name].validation
    began = time.perf_counter()
    if trainer.domains[name].task.needs_text:
        trainer.evaluator.decode_answers(name, samples)
    else:
        trainer.evaluator.accuracy_in_words(name, samples)
    return (time.perf_counter() - began) / len(samples)


def _decode_s_per_sample(domain: Domain) -> float:
    began = time.perf_counter()
    answers = answers_before_training(domain)
    return (time.perf_counter() - began) / len(answers)
