"""The tasks that a model family cannot be trained for. Every served family can be trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusion.plan.schema import Plan
from heads import TASKS
from vlora.models.vision.token_grids import why_no_grid
from vlora.plan_files.errors import PlanErrors


def refuse_heads(plan: Plan, tasks: Mapping[str, str], config: Any, errors: PlanErrors) -> None:
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
