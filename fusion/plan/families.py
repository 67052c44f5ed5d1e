"""Which of the served model families can be trained, and which tasks on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusion.plan.mistakes import Mistakes
from fusion.plan.schema import Plan
from heads import TASKS
from vlora.models.families import FAMILIES, family_of
from vlora.models.token_grids import why_no_grid

_WHY_NOT = {
    "qwen3_vl": "its vision tower also feeds the first decoder layers (deepstack), which training does not compute",
}
TRAINED = tuple(name for name in FAMILIES if name not in _WHY_NOT)
"""Families whose training forward is that of transformers, by model type."""


def why_not_trained(config: Any) -> str | None:
    """Why a model of this transformers config cannot be trained, with the families that can; None where it can.

    Raises:
        UnsupportedModel: the family is not even served.
    """
    family = family_of(config).model_type
    why = _WHY_NOT.get(family)
    if why is None:
        return None
    return f"models of the family {family} cannot be trained: {why}; families that can: {', '.join(TRAINED)}"


def refuse_heads(plan: Plan, tasks: Mapping[str, str], config: Any, mistakes: Mistakes) -> None:
    """Note each domain whose head reads image tokens as a grid, where those of this base model form none.

    Args:
        tasks: the task of each domain, by its name; a domain that is left out is not checked.
    """
    why = why_no_grid(config)
    if why is None:
        return
    for place, domain in enumerate(plan.domains):
        task = TASKS.get(tasks.get(domain.name, ""))
        if task is not None and task.reads_images:
            mistakes.inside("domains", place).add(
                f"{task.kind} cannot be trained on {plan.base}: its head reads image tokens as a grid, but {why}; "
                "choose another base, or another task"
            )
