"""Phase 2: the base model is loaded, and every domain's samples are encoded for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from atmm.formats import FORMATS
from atmm.quantized import BLOCK
from fusion.embedded import checkpoint_path
from fusion.phases.plan_checked import PlanChecked
from fusion.plan.schema import Plan
from fusion.progress.progress import Progress
from fusion.training.activation import invocation_tokens
from fusion.training.domain import Domain
from fusion.training.fingerprint import Inputs, hash_of_processing, inputs_of
from fusion.training.frozen_base import FrozenBase
from vlora.config import EngineConfig, Quantize
from vlora.errors import BadConfig, BadPlan
from vlora.models import InputProcessor
from vlora.models.loading import load_model
from vlora.models.stored_quantized import language_linears
from vlora.plan_files.errors import PlanErrors


@dataclasses.dataclass(frozen=True)
class DataReady:
    """The base model and the domains encoded for it, in the plan's order.

    teacher_scores: validation score of each teacher, by domain. inputs: everything that the run's trainings depend on.
    """

    plan: Plan
    base: FrozenBase
    domains: Mapping[str, Domain]
    teacher_scores: Mapping[str, float]
    inputs: Inputs


def prepare_data(checked: PlanChecked, out: Path, progress: Progress, *, device: str, encode: bool = True) -> DataReady:
    """Load the base model and, if `encode`, all samples for it, else those that are used; image features are stored in
    OUT/features.

    Raises:
        BadPlan: the base model cannot process a sample.
        BadConfig: a part of the base model is missing.
    """
    plan = checked.plan
    base = load_frozen_base(plan, device, progress, features=out / "features")
    splits = {name: data.splits for name, data in checked.data.items()}
    inputs = inputs_of(plan, splits, base.weights, hash_of_processing(base.processor), device, progress)
    return DataReady(plan, base, domains_for(checked, base, encode=encode), checked.teacher_scores, inputs)


def load_frozen_base(plan: Plan, device: str, progress: Progress, *, features: Path | None = None) -> FrozenBase:
    """Load the plan's base model. Raises BadConfig if a part of it is missing, BadPlan if adapters cannot begin."""
    path = checkpoint_path() if plan.base == "embedded" else plan.base
    processor = InputProcessor.from_pretrained(path)
    model = load_model(EngineConfig(model=path, device=device, dtype="float32"))
    round_base(model, plan.quantize)
    return FrozenBase(
        model,
        processor,
        features=features,
        train_vision=plan.lora.vision,
        invocation=invocation_tokens(plan.lora, processor),
        progress=progress,
    )


def domains_for(checked: PlanChecked, base: FrozenBase, *, encode: bool) -> dict[str, Domain]:
    """The domains. Raises BadPlan, with the place in the plan, if the base model cannot process data to encode."""
    errors = PlanErrors(checked.text)
    domains = {}
    for index, domain in enumerate(checked.plan.domains):
        domains[domain.name] = Domain(domain, checked.data[domain.name].splits, base)
        try:
            if encode:
                domains[domain.name].encode()
        except BadPlan as error:
            errors.inside("domains", index).add(str(error))
    errors.raise_if_any()
    return domains


# A base model that is served quantized: adapters are trained on its rounded weights (QLoRA, arXiv:2305.14314).


def round_base(model: Any, quantize: Quantize) -> None:
    """Round the weights that `vlora serve --quantize` rounds, in place and in their dtype.

    Products round their inputs too when they are served; trainings do not.

    Args:
        model: A transformers model.
        quantize: The format.

    Raises:
        BadConfig: The format cannot store one of the layers.
    """
    if quantize == "none":
        return
    weight_format = FORMATS[quantize]
    with torch.no_grad():
        for name, linear in language_linears(model).items():
            if linear.in_features % weight_format.alignment:
                raise BadConfig(
                    f"quantize {quantize} needs layers with inputs in multiples of {weight_format.alignment}; "
                    f"{name} has {linear.in_features}; set another format"
                )
            for rows in linear.weight.split(max(1, BLOCK // linear.in_features)):
                rows.copy_(weight_format.decode(*weight_format.encode(rows)))
