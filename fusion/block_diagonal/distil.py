"""Distillation: training a converted adapter to answer like the original, and scores of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn

from fusion.plan.check import PlanChecked
from fusion.plan.schema import TrainingPlan
from fusion.progress import Progress, ProgressCallback
from fusion.training.collator import EncodedSample, forward_samples
from fusion.training.frozen_base import Domain, FrozenBase
from fusion.training.objectives import ForwardOutputs, HeadObjective, trainable_head
from fusion.training.steps import EarlyStopping, Schedule, mixed_precision
from heads import TaskHead
from heads.storage import write_tensors
from vlora.adapter_files import WEIGHTS_FILE
from vlora.config import EngineConfig
from vlora.errors import BadAdapter, BadPlan
from vlora.lora.peft_format import AdapterHeader
from vlora.models.loading import load_model
from vlora.models.processing import InputProcessor

_GENTLER = 1 / 3  # of the plan's learning rate, since distillation starts near the optimum
_FAR = 0.1  # initial distance of hidden states; below it, the learning rate is reduced further
_EVALUATIONS = 8  # evaluations on validation data during training, to select the best state
_HELD_OUT_SAMPLES = 40  # validation samples of each domain per evaluation
_AT_ONCE = 50
_ORIGINAL, _CONVERTED = "original", "converted"


class DistillationScores(NamedTuple):
    """A domain's score on test data: of the original adapter, after conversion, and after distillation.

    apart_converted, apart_distilled: relative distance of hidden states from the original's, after each of the two.
    """

    domain: str
    original: float
    converted: float
    distilled: float
    apart_converted: float
    apart_distilled: float


def distil(
    original: AdapterHeader, converted: Path, base_path: str, checked: PlanChecked, progress: Progress
) -> list[DistillationScores]:
    """Train the adapter in `converted` to reproduce the original's hidden states.

    Training data comes from the plan's domains for which the adapter has heads: the plan's number of steps for each, at
    a third of its learning rate or less. The state nearest to the original on validation data, possibly the initial
    one, is written to `converted`.

    The loss compares the inputs of heads and of an answer's first token: the final hidden states of last prompt tokens
    and of image tokens. Labels are not used.

    Raises:
        BadAdapter: the adapter changes the vision side, or is an activated one.
        BadPlan: no domain has a head, or its labels differ from the head's.
    """
    if original.touches_vision:
        raise BadAdapter(
            f"{original.path} adapts the vision side, but distillation keeps image features fixed; omit --data"
        )
    if original.invocation:
        raise BadAdapter(
            f"{original.path} is activated by tokens of the prompt, but distillation changes it for all; omit --data"
        )
    plan = checked.plan
    base = FrozenBase(
        load_model(EngineConfig(model=base_path, dtype="float32")),
        InputProcessor.from_pretrained(base_path),
        progress=progress,
    )
    domains = {
        domain.name: Domain(domain, checked.data[domain.name].splits, base)
        for domain in plan.domains
        if domain.name in original.heads
    }
    if not domains:
        raise BadPlan(
            f"none of the plan's domains ({', '.join(domain.name for domain in plan.domains)}) has a head in "
            f"{original.path}, which has {', '.join(original.heads) or 'none'}"
        )
    for name, domain in domains.items():
        if not isinstance(domain.task, HeadObjective):
            raise BadPlan(f"{name} is answered in words in the plan, but by a head in the adapter")
        own, wanted = domain.task.task.labels, original.heads[name].spec.labels
        if own != wanted:
            raise BadPlan(
                f"the data of {name} has the labels {', '.join(own)}, the adapter's head {', '.join(wanted)}; set the "
                "domain's `labels` to the head's, in this order"
            )
    pair = _AdapterPair(base, original, converted, bfloat16=plan.training.bfloat16)

    def scored(which: str) -> dict[str, float]:
        found: dict[str, float] = {}
        with progress.work(f"scoring the {which} adapter", len(domains), "domains") as update:
            for name, domain in domains.items():
                found[name] = pair.score(which, domain, original.heads[name])
                update(len(found))
        return found

    def distance() -> dict[str, float]:
        return {name: pair.distance(domain.test) for name, domain in domains.items()}

    first, second, before = scored(_ORIGINAL), scored(_CONVERTED), distance()
    steps = plan.training.steps * len(domains)
    samples = [sample for domain in domains.values() for sample in domain.train]
    held_out = [sample for domain in domains.values() for sample in domain.validation[:_HELD_OUT_SAMPLES]]
    with progress.work(f"distilling {', '.join(domains)}", steps, "steps") as update:
        pair.train(samples, held_out, steps, plan.training, np.random.default_rng(plan.seed), update)
    write_tensors(pair.factors(), converted / WEIGHTS_FILE, {"format": "pt"})
    third, after = scored(_CONVERTED), distance()
    return [
        DistillationScores(name, first[name], second[name], third[name], before[name], after[name]) for name in domains
    ]


class _AdapterPair:
    def __init__(self, base: FrozenBase, original: AdapterHeader, converted: Path, *, bfloat16: bool) -> None:
        self._base = base
        self._peft = PeftModel.from_pretrained(base.model, str(original.path), adapter_name=_ORIGINAL)
        self._peft.load_adapter(str(converted), _CONVERTED, is_trainable=True)
        self._peft.eval()  # both without dropout, as in serving
        self._bfloat16 = bfloat16

    def train(
        self,
        samples: Sequence[EncodedSample],
        held_out: Sequence[EncodedSample],
        steps: int,
        settings: TrainingPlan,
        rng: np.random.Generator,
        update: ProgressCallback,
    ) -> None:
        """Train, then restore the state that was nearest to the original on the samples in `held_out`."""
        self._peft.set_adapter(_CONVERTED)
        parameters = [p for p in self._peft.parameters() if p.requires_grad]
        early = EarlyStopping[list[Tensor]]()

        def evaluate() -> None:
            early.stops(self.distance(held_out), lambda: [p.detach().clone() for p in parameters])

        evaluate()
        # Adam's step size depends on the rate alone: a large rate would move away from a start that is already near.
        rate = settings.learning_rate * _GENTLER * min(1.0, early.smallest / _FAR)
        optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
        evaluated_after = {steps * look // _EVALUATIONS for look in range(1, _EVALUATIONS + 1)}
        for step in Schedule(optimizer, rate, steps, warm_up=1):
            batch = [samples[i] for i in rng.integers(len(samples), size=settings.batch_size)]
            with torch.no_grad():
                wanted = self._read(_ORIGINAL, batch)
            loss = _distance(self._read(_CONVERTED, batch), wanted)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step + 1 in evaluated_after:
                evaluate()
            apart = f"held-out hidden states apart by {early.smallest:.3f} at best"
            update(step + 1, f"loss {float(loss.detach()):.4f}, {apart}")
        assert early.best is not None
        with torch.no_grad():
            for parameter, kept in zip(parameters, early.best, strict=True):
                parameter.copy_(kept)

    @torch.no_grad()
    def score(self, which: str, domain: Domain, head: TaskHead) -> float:
        """The domain's metric on its test data."""
        module = trainable_head(head, self._base.hf_model.device)
        served = HeadObjective(head.task, domain.task.metric_name)  # calibrated as in the adapter's file
        answers: list[object] = []
        for part in _parts(domain.test):
            found = served.answers(self._read(which, part), module, [sample.target for sample in part])
            answers += [sample.of_whole_pictures(answer) for sample, answer in zip(part, found, strict=True)]
        return served.metric(answers, [sample.target for sample in domain.test])

    @torch.no_grad()
    def distance(self, samples: Sequence[EncodedSample]) -> float:
        """Square root of the mean over samples of the training loss."""
        squares = [
            float(_distance(self._read(_CONVERTED, part), self._read(_ORIGINAL, part))) * len(part)
            for part in _parts(samples)
        ]
        return math.sqrt(sum(squares) / len(samples))

    def factors(self) -> dict[str, Tensor]:
        state = get_peft_model_state_dict(self._peft, adapter_name=_CONVERTED)
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def _read(self, which: str, samples: Sequence[EncodedSample]) -> ForwardOutputs:
        self._peft.set_adapter(which)
        seen = [sample.embeddings for sample in samples]  # read from disk on each access
        features = [rows for rows in seen if rows is not None]
        with mixed_precision(self._base.hf_model.device, self._bfloat16):
            return forward_samples(self._base.hf_model, samples, features)


def _parts(samples: Sequence[EncodedSample]) -> list[Sequence[EncodedSample]]:
    return [samples[first : first + _AT_ONCE] for first in range(0, len(samples), _AT_ONCE)]


def _distance(found: ForwardOutputs, wanted: ForwardOutputs) -> Tensor:
    """Squared distance relative to the original's squared norm, averaged over the two kinds of hidden states."""
    kinds = ((found.last, wanted.last), (torch.cat(found.images), torch.cat(wanted.images)))
    return torch.stack([(a.float() - b.float()).square().sum() / b.float().square().sum() for a, b in kinds]).mean()
