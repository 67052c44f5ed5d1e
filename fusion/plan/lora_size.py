"""Size of a plan's adapters, computed from the model's shapes alone, and whether they can be created at all."""

from __future__ import annotations

import dataclasses

import torch
from transformers import AutoConfig

from fusion.block_diagonal.blocks import num_parameters, undivided
from fusion.embedded import checkpoint_path
from fusion.plan.schema import Plan
from vlora.models.hf_model import HFModel
from vlora.models.loading import dummy_model
from vlora.models.pretrained import from_pretrained
from vlora.plan_files.errors import PlanErrors

_BYTES = 4  # adapters are trained and stored in float32


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
    language = {name: layer for name, layer in hf_model.language_linears.items() if _wanted(name, plan.lora.targets)}
    known = sorted({name.rpartition(".")[2] for name in hf_model.language_linears})
    unknown = [target for target in plan.lora.targets or () if target not in known]
    if unknown:
        errors.add(f"the model has no {', '.join(unknown)}; it has {', '.join(known)}", "lora", "targets")
        return None
    if wrong := undivided(plan.lora, language):
        errors.add(wrong, "lora", "blocks")
        return None
    layers = {**language, **(hf_model.vision_linears if plan.lora.vision else {})}
    return LoraSize(len(layers), sum(num_parameters(plan.lora, name, layer) for name, layer in layers.items()))


def _wanted(name: str, targets: tuple[str, ...] | None) -> bool:
    return targets is None or name.rpartition(".")[2] in targets
