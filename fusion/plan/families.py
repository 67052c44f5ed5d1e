"""The served model families that can be trained, and the tasks that each supports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusion.plan.errors import PlanErrors
from fusion.plan.schema import Plan
from heads import TASKS
from vlora.models.families import FAMILIES, family_of
from vlora.models.vision.token_grids import why_no_grid

_WHY_NOT = {
    "qwen3_vl": "its vision tower also feeds the first decoder layers (deepstack), which training does not compute",
}
TRAINED = tuple(name for name in FAMILIES if name not in _WHY_NOT)
"""Model types of the families with the same training forward as transformers."""


def why_not_trained(config: Any) -> str | None:
    """Return why a model of this transformers config cannot be trained, with the families that can; None if it can.

    Raises:
        UnsupportedModel: the family is not served either.
    """
    family = family_of(config).model_type
    why = _WHY_NOT.get(family)
    if why is None:
        return None
    return f"models of the family {family} cannot be trained: {why}; families that can: {', '.join(TRAINED)}"


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
