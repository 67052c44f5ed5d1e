"""The plan and its data are checked before any training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig

from fusion.block_diagonal.blocks import num_parameters, undivided
from fusion.data.load import DomainData, load_domains
from fusion.embedded import checkpoint_path
from fusion.plan.schema import Plan, PlanFile
from fusion.progress import Progress
from heads import TASKS
from vlora.models.hf_model import HFModel
from vlora.models.loading import dummy_model
from vlora.models.pretrained import from_pretrained
from vlora.models.vision.token_grids import why_no_grid
from vlora.plan_files.errors import PlanErrors, PlanText

_BYTES = 4  # adapters are trained and stored in float32

# Size of a plan's adapters, computed from the model's shapes alone, and whether they can be created at all.


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


@dataclasses.dataclass(frozen=True)
class PlanChecked:
    """A plan that can be run, with the text it was read from. data: by domain name. size: of each adapter."""

    plan: Plan
    text: PlanText
    data: Mapping[str, DomainData]
    size: LoraSize

    @property
    def teacher_scores(self) -> dict[str, float]:
        """Validation scores of the teachers, for domains that have one."""
        scores = {name: data.teacher_score for name, data in self.data.items()}
        return {name: score for name, score in scores.items() if score is not None}


def check_plan(file: PlanFile, progress: Progress | None = None) -> PlanChecked:
    """Check a plan and its data before training.

    Args:
        progress: display for reading pictures and labelling by teachers.

    Raises:
        BadPlan: lists every error found.
    """
    plan, errors = file.plan, PlanErrors(file.text)
    model = shapes_of(plan, errors)
    size = None if model is None else lora_size(plan, model, errors)
    data = load_domains(plan, errors, progress)
    if model is not None:
        _refuse_heads(plan, {name: own.splits.task for name, own in data.items()}, model.config, errors)
    errors.raise_if_any()
    assert size is not None, "a missing size has been reported as an error"
    return PlanChecked(plan, file.text, data, size)


def _refuse_heads(plan: Plan, tasks: Mapping[str, str], config: Any, errors: PlanErrors) -> None:
    """Report each domain with a head that needs a grid of image tokens, if those of this base model form no grid.

    Args:
        tasks: task by domain name; a domain that is missing here is not checked.
    """
    why = why_no_grid(config)
    if why is None:
        return
    for place, domain in enumerate(plan.domains):
        task = TASKS.get(tasks.get(domain.name, ""))
        if task is not None and task.reads_images:
            errors.inside("domains", place).add(
                f"{task.kind} cannot be trained on {plan.base}: its head reads image tokens as a grid, but {why}; "
                "choose another base, or another task"
            )
