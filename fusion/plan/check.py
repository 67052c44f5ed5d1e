"""The plan and its data are checked before any training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fusion.data.load import DomainData, load_domains
from fusion.plan.schema import Plan, PlanFile
from fusion.progress import Progress
from vlora.plan_files.errors import PlanErrors, PlanText

if TYPE_CHECKING:
    from fusion.plan.estimate import LoraSize


@dataclasses.dataclass(frozen=True)
class PlanChecked:
    """A plan that can be run, with the text it was read from. data: by domain name. size: of each adapter."""

    plan: Plan
    text: PlanText
    data: Mapping[str, DomainData]
    size: LoraSize

    @property
    def teacher_scores(self) -> dict[str, float]:
        scores = {name: data.teacher_score for name, data in self.data.items()}
        return {name: score for name, score in scores.items() if score is not None}


def check_plan(file: PlanFile, progress: Progress | None = None) -> PlanChecked:
    """Check a plan and its data before training.

    Raises:
        BadPlan: lists every error in the plan's data; if there is none, every error for its base model.
    """
    plan, errors, progress = file.plan, PlanErrors(file.text), progress or Progress()
    data = load_domains(plan, errors, progress)
    errors.raise_if_any()  # before torch loads
    with progress.work("loading torch, transformers and peft", 1, "step"):
        from fusion.plan.estimate import lora_size, refuse_heads, shapes_of
    size = None
    if (model := shapes_of(plan, errors)) is not None:
        size = lora_size(plan, model, errors)
        refuse_heads(plan, data, model.config, errors)
    errors.raise_if_any()
    assert size is not None, "a missing size has been reported as an error"
    return PlanChecked(plan, file.text, data, size)
