"""What a run takes: the size of its adapters, from shapes alone, and its time, from a few real training steps."""

from __future__ import annotations

import dataclasses
import itertools
import math
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig

from fusion.block_diagonal.blocks import num_parameters, undivided
from fusion.data.load import DomainData
from fusion.embedded import checkpoint_path
from fusion.packing.guided import max_trainings, min_trainings, trained_alone
from fusion.plan.schema import HEAD_SAMPLES, HEAD_STEPS, READ_IMAGES, Plan
from fusion.training.frozen_base import Domain, FrozenBase
from fusion.training.scoring import MAX_SAMPLES, answers_before_training
from fusion.training.trainer import LoraTrainer, StepTime
from vlora.models.hf_model import HFModel
from vlora.models.loading import dummy_model
from vlora.models.pretrained import from_pretrained
from vlora.models.vision.token_grids import why_no_grid
from vlora.plan_files.errors import PlanErrors

_BYTES = 4  # adapters are trained and stored in float32
_BUDGET_S = 4.0  # for measured steps of a whole batch
_MOST_STEPS = 8
_TRIES = 3  # steps of few samples; the fastest counts, since other processes may slow one down
_HEAD_TRIES, _MOST_HEAD_SAMPLES = 4, 128  # measured steps of a head that trains by itself, and samples in each


@dataclasses.dataclass(frozen=True)
class LoraSize:
    """layers: linear layers with a delta."""

    layers: int
    parameters: int

    @property
    def num_bytes(self) -> int:
        return self.parameters * _BYTES


def shapes_of(plan: Plan, errors: PlanErrors) -> HFModel | None:
    """The plan's base model without weights, on the meta device.

    Returns None and reports an error if the model cannot be loaded or its family is not supported.
    """
    base = checkpoint_path() if plan.base == "embedded" else plan.base
    try:
        config = from_pretrained(AutoConfig, base)
        model = dummy_model(config, "float32", torch.device("meta"), seed=0)
    except Exception as error:  # libraries raise arbitrary errors for a broken config
        errors.add(f'{plan.base!r} is neither "embedded" nor a model that can be loaded: {error}', "base")
        return None
    return HFModel(model)


def lora_size(plan: Plan, hf_model: HFModel, errors: PlanErrors) -> LoraSize | None:
    """Size of the plan's adapters for a base model, of which only shapes are read.

    Returns None and reports an error for targets or blocks that the model does not support.
    """
    known = sorted({name.rpartition(".")[2] for name in hf_model.language_linears})
    wanted = plan.lora.targets or known
    language = {name: each for name, each in hf_model.language_linears.items() if name.rpartition(".")[2] in wanted}
    unknown = [target for target in wanted if target not in known]
    if unknown:
        errors.add(f"the model has no {', '.join(unknown)}; it has {', '.join(known)}", "lora", "targets")
        return None
    if wrong := undivided(plan.lora, language):
        errors.add(wrong, "lora", "blocks")
        return None
    layers = {**language, **(hf_model.vision_linears if plan.lora.vision else {})}
    return LoraSize(len(layers), sum(num_parameters(plan.lora, name, layer) for name, layer in layers.items()))


def refuse_heads(plan: Plan, data: Mapping[str, DomainData], config: Any, errors: PlanErrors) -> None:
    """Report each domain with a head that needs a grid of image tokens, if those of this base model form no grid."""
    why = why_no_grid(config)
    for place, domain in enumerate(plan.domains):
        task = data[domain.name].splits.task
        if why is not None and task in READ_IMAGES:
            errors.inside("domains", place).add(
                f"{task} cannot be trained on {plan.base}: its head reads image tokens as a grid, but {why}; "
                "choose another base, or another task"
            )


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Approximate duration of a run in seconds.

    at_least_s: if every domain fits where it is tried first. at_most_s: if no domain fits anywhere. training_s: of one
    training of one domain, with its scores. step_s: duration of one step of batch_size samples of the LoRA, or of a
    head if all domains have heads that train by themselves. measured_steps: number of steps that step_s is the mean of.
    measured_samples: samples per measured step; fewer than batch_size if a full step takes too long to measure.
    threads: None on a GPU. memory_bytes: most memory so far, of this process or on the GPU. features_bytes: of the
    pictures' features that a run stores in OUT.
    """

    at_least_s: float
    at_most_s: float
    training_s: float
    step_s: float
    batch_size: int
    measured_steps: int
    measured_samples: int
    device: str
    threads: int | None
    memory_bytes: int
    features_bytes: int


class _Rates(NamedTuple):
    """Seconds per sample, by domain: encoding its pictures, scoring it, and asking the base model about it."""

    encode: Mapping[str, float]
    score: Mapping[str, float]
    ask: Mapping[str, float]


class _Measured(NamedTuple):
    """A whole step's duration, from `steps` measured steps of `samples` samples."""

    whole: StepTime
    steps: int
    samples: int


def estimate(plan: Plan, data: Mapping[str, DomainData], base: FrozenBase) -> Estimate:
    """Measure training steps at the plan's batch shape, and encoding and scoring of a few samples of each domain.

    The first steps have one sample of each domain. If they predict that a step of the whole batch takes seconds, the
    whole batch is not measured, so an estimate takes a few seconds besides loading the model, whatever its size.

    Args:
        base: the plan's base model, to which an adapter is added.

    Raises:
        BadPlan: a sample cannot be encoded for the base model.
    """
    rates, domains = _encode_few(plan, data, base, 1)
    trainer = LoraTrainer(base, domains, plan)
    heads = [name for name in data if trainer.adapter.is_independent(name)]  # they are not in the LoRA's batches
    rows = list(itertools.islice(itertools.cycle(name for name in data if name not in heads), plan.training.batch_size))
    lora = _measure_steps(plan, data, base, trainer, rows, rates) if rows else None
    alone = {name: _measure_head(plan, trainer, name) for name in heads}
    shown = lora or next(iter(alone.values()))
    training = [_training_s(plan, HEAD_STEPS * plan.training.steps, own.whole) for own in alone.values()]
    if lora is not None:
        training += [_training_s(plan, plan.training.steps, lora.whole)] * (len(data) - len(heads))
    score = {name: _score_s_per_sample(trainer, name) for name in trainer.domains}
    ask = {name: _decode_s_per_sample(domain) for name, domain in trainer.domains.items()}
    once, validation = _run_s(plan, data, _Rates(rates, score, ask))
    one = sum(training) / len(training) + validation
    teacher_scores = {name: own.teacher_score for name, own in data.items() if own.teacher_score is not None}
    first = trained_alone(plan, teacher_scores)
    return Estimate(
        at_least_s=once + one * min_trainings(plan, first),
        at_most_s=once + one * max_trainings(plan, first),
        training_s=one,
        step_s=shown.whole.wall_s,
        batch_size=len(rows) or HEAD_SAMPLES * plan.training.batch_size,
        measured_steps=shown.steps,
        measured_samples=shown.samples,
        device=base.hf_model.device.type,
        threads=torch.get_num_threads() if base.hf_model.device.type == "cpu" else None,
        memory_bytes=_memory_bytes(base.hf_model.device),
        features_bytes=round(
            sum(
                _features_bytes(domain) * sum(map(len, data[name].splits.parts.values()))
                for name, domain in trainer.domains.items()
            )
        ),
    )


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _features_bytes(domain: Domain) -> float:
    """Of one sample, the mean of those encoded; 0 if trainings change the features."""
    samples = [*domain.train, *domain.validation, *domain.test]
    return sum(seen.nbytes for sample in samples if (seen := sample.embeddings) is not None) / len(samples)


def _measure_steps(
    plan: Plan,
    data: Mapping[str, DomainData],
    base: FrozenBase,
    trainer: LoraTrainer,
    rows: Sequence[str],
    rates: dict[str, float],
) -> _Measured:
    """Measure steps of the LoRA; encodes more samples for a whole batch and then updates `rates`."""
    few = rows[: len(set(rows))]
    with base.progress.work("measuring steps", _MOST_STEPS, "steps") as update:
        trainer.time_step(few)  # the first step of a process is slower than later ones
        tried: list[StepTime] = []
        while len(tried) < _TRIES and _wall_s(tried) < _BUDGET_S:
            tried.append(trainer.time_step(few))
        measured, samples = [min(tried)], len(few)
        expected = measured[0].wall_s * len(rows) / samples + sum(rates[name] for name in rows)
        if expected < _BUDGET_S:
            again, domains = _encode_few(plan, data, base, math.ceil(len(rows) / len(few)))
            rates.update(again)
            trainer.domains.update(domains)
            measured, samples = [], len(rows)
            while not measured or (len(measured) < _MOST_STEPS and _wall_s(measured) + measured[-1].wall_s < _BUDGET_S):
                measured.append(trainer.time_step(rows))
                update(len(measured))
    share = len(rows) / samples / len(measured)
    whole = StepTime(_wall_s(measured) * share, sum(each.cpu_s for each in measured) * share)
    return _Measured(whole, len(measured), samples)


def _measure_head(plan: Plan, trainer: LoraTrainer, name: str) -> _Measured:
    count = HEAD_SAMPLES * plan.training.batch_size
    samples = min(count, _MOST_HEAD_SAMPLES)
    found = trainer.time_head_step(name, samples, _HEAD_TRIES)
    share = count / samples
    return _Measured(StepTime(found.wall_s * share, found.cpu_s * share), _HEAD_TRIES, samples)


def _wall_s(steps: Sequence[StepTime]) -> float:
    return sum(each.wall_s for each in steps)


def _training_s(plan: Plan, steps: int, step: StepTime) -> float:
    """Seconds of a training, within the processor time that the plan allows."""
    whole = steps * step.wall_s
    if plan.training.seconds is None or steps * step.cpu_s <= plan.training.seconds:
        return whole
    return plan.training.seconds * step.wall_s / step.cpu_s


def _run_s(plan: Plan, data: Mapping[str, DomainData], rates: _Rates) -> tuple[float, float]:
    """Seconds of the work that a run does once, and of the scoring after one training of one domain."""
    once, validation = 0.0, 0.0
    for name, own in data.items():
        splits = own.splits
        if not plan.lora.vision:  # else every step encodes its own pictures
            once += rates.encode[name] * sum(map(len, splits.parts.values()))
        once += rates.ask[name] * min(MAX_SAMPLES, len(splits.test)) + rates.score[name] * len(splits.test)
        validation += rates.score[name] * len(splits.validation) / len(data)
    # In sequence, an adapter holds half of the domains on average and all are scored; jointly, each is scored once.
    return once, validation * (1.0 if plan.packing in ("guided", "jointly") else (len(data) + 1) / 2)


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
