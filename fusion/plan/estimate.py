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
from fusion.packing.guided import num_trainings, trained_alone
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
    """The plan's base model without weights, on the meta device. Returns None and reports an error if it cannot be
    loaded or its family is not supported."""
    base = checkpoint_path() if plan.base == "embedded" else plan.base
    try:
        config = from_pretrained(AutoConfig, base)
        model = dummy_model(config, "float32", torch.device("meta"), seed=0)
    except Exception as error:  # libraries raise arbitrary errors for a broken config
        errors.add(f'{plan.base!r} is neither "embedded" nor a model that can be loaded: {error}', "base")
        return None
    return HFModel(model)


def lora_size(plan: Plan, hf_model: HFModel, errors: PlanErrors) -> LoraSize | None:
    """Size of the plan's adapters. Returns None and reports an error for targets or blocks that the model does not
    support."""
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
    encode_s, domains = _encode_few(plan, data, base, 1)
    trainer = LoraTrainer(base, domains, plan)
    heads = [name for name in data if trainer.adapter.is_independent(name)]  # they are not in the LoRA's batches
    rows = list(itertools.islice(itertools.cycle(name for name in data if name not in heads), plan.training.batch_size))
    lora = _measure_steps(plan, data, base, trainer, rows, encode_s) if rows else None
    alone = {name: _measure_head(plan, trainer, name) for name in heads}
    shown = lora or next(iter(alone.values()))
    training = [_training_s(plan, HEAD_STEPS * plan.training.steps, own.whole) for own in alone.values()]
    if lora is not None:
        training += [_training_s(plan, plan.training.steps, lora.whole)] * (len(data) - len(heads))
    once, validation, features = 0.0, 0.0, 0.0
    for name, domain in trainer.domains.items():
        parts = data[name].splits.parts
        count = sum(map(len, parts.values()))
        if not plan.lora.vision:  # else every step encodes its own pictures
            once += encode_s[name] * count
        ask_s, score_s = _ask_s(domain), _score_s(trainer, name)
        once += ask_s * min(MAX_SAMPLES, len(parts["test"])) + score_s * len(parts["test"])
        validation += score_s * len(parts["validation"]) / len(data)
        features += _features_bytes(domain) * count
    # In sequence, an adapter holds half of the domains on average and all are scored; jointly, each is scored once.
    validation *= 1.0 if plan.packing in ("guided", "jointly") else (len(data) + 1) / 2
    one = sum(training) / len(training) + validation
    alone_first = trained_alone(plan, {name: own.teacher_score for name, own in data.items()})
    fewest, most = num_trainings(plan, alone_first)
    device = base.hf_model.device
    on_cpu, of_gpu = device.type == "cpu", torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Estimate(
        at_least_s=once + one * fewest,
        at_most_s=once + one * most,
        training_s=one,
        step_s=shown.whole.wall_s,
        batch_size=len(rows) or HEAD_SAMPLES * plan.training.batch_size,
        measured_steps=shown.steps,
        measured_samples=shown.samples,
        device=device.type,
        threads=torch.get_num_threads() if on_cpu else None,
        memory_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if on_cpu else of_gpu,
        features_bytes=round(features),
    )


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
    encode_s: dict[str, float],
) -> _Measured:
    """Measure steps of the LoRA; encodes more samples for a whole batch and then updates `encode_s`."""
    few = rows[: len(set(rows))]
    with base.progress.work("measuring steps", _MOST_STEPS, "steps") as update:
        trainer.time_step(few)  # the first step of a process is slower than later ones
        tried: list[StepTime] = []
        while len(tried) < _TRIES and _wall_s(tried) < _BUDGET_S:
            tried.append(trainer.time_step(few))
        measured, samples = [min(tried)], len(few)
        expected = measured[0].wall_s * len(rows) / samples + sum(encode_s[name] for name in rows)
        if expected < _BUDGET_S:
            again, domains = _encode_few(plan, data, base, math.ceil(len(rows) / len(few)))
            encode_s.update(again)
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


def _score_s(trainer: LoraTrainer, name: str) -> float:
    """Seconds to score a sample: one forward, or decoding an answer if the metric compares texts."""
    samples, evaluator = trainer.domains[name].validation, trainer.evaluator
    in_words = trainer.domains[name].task.needs_text
    began = time.perf_counter()
    (evaluator.decode_answers if in_words else evaluator.accuracy_in_words)(name, samples)
    return (time.perf_counter() - began) / len(samples)


def _ask_s(domain: Domain) -> float:
    """Seconds to ask the base model about a sample."""
    began = time.perf_counter()
    answers = answers_before_training(domain)
    return (time.perf_counter() - began) / len(answers)
