"""Phase 1: the plan and its data are checked before any training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fusion.data.load import DomainData, load_domains
from fusion.plan.lora_size import LoraSize, lora_size, shapes_of
from fusion.plan.plan_file import PlanFile
from fusion.plan.schema import Plan
from fusion.progress.progress import Progress
from heads import TASKS
from vlora.models.vision.token_grids import why_no_grid
from vlora.plan_files.errors import PlanErrors, PlanText


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
