"""What a plan can ask for and training does not do yet: refused by name, since a promise that is ignored is broken."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.data.load import DomainData
from fusion.mistakes import Mistakes
from fusion.plan import Plan, RelativeThreshold
from fusion.tasks import HEADS, METRICS, WORDS
from heads import TASKS


def tell_not_yet(plan: Plan, mistakes: Mistakes) -> None:
    """Settings that training would not honour. One line each, to be deleted with its reason."""
    asked: list[tuple[bool, tuple[int | str, ...], str]] = [
        (plan.lora.rslora, ("lora", "rslora"), "rank-stabilised scaling"),
        (plan.lora.targets is not None, ("lora", "targets"), "a choice of layers"),
        (plan.lora.vision, ("lora", "vision"), "an adapter on the vision side"),
        (plan.order != ("given",), ("order",), "any order but `given`"),
        (plan.packing != "naive", ("packing",), "first-fit packing"),
        (plan.confidence is not None, ("confidence",), "deciding on a lower confidence bound"),
    ]
    for place, domain in enumerate(plan.domains):
        alone = isinstance(domain.threshold, RelativeThreshold) and domain.threshold.relative_to == "alone"
        asked.append((alone, ("domains", place, "threshold"), "a threshold relative to an adapter of its own"))
    for wanted, location, what in asked:
        if wanted:
            mistakes.add(f"{what} is not supported yet", *location)


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
