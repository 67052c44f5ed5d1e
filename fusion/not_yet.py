"""What a plan can ask for and training does not do yet: refused by name, since a promise that is ignored is broken."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.data.load import DomainData
from fusion.mistakes import Mistakes
from fusion.plan import Plan
from fusion.tasks import HEADS, METRICS, WORDS
from heads import TASKS


def tell_not_measured(plan: Plan, data: Mapping[str, DomainData], mistakes: Mistakes) -> None:
    """Tasks and metrics that training does not know."""
    for place, domain in enumerate(plan.domains):
        if domain.name not in data:
            continue
        task = data[domain.name].splits.task
        metric, measured = domain.metric or METRICS[task][0], _measured(task)
        if metric in METRICS[task] and metric not in measured:
            field = "metric" if measured else "task"
            asked = f"the metric {metric!r} of {task}" if measured else f"the task {task}"
            mistakes.add(f"{asked} is not supported yet", "domains", place, field)


def _measured(task: str) -> tuple[str, ...]:
    """The metrics that training decides on: a head's first, and whether words are right."""
    if WORDS in HEADS[task][:1]:
        return "exact_match", "accuracy"
    return METRICS[task][:1] if task in TASKS else ()
