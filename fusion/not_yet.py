"""What a plan can ask for and training does not do yet: refused by name, since a promise that is ignored is broken."""

from __future__ import annotations

from fusion.mistakes import Location, Mistakes
from fusion.plan import DomainPlan, Plan, PlanFile, RelativeThreshold

# Tasks that training and tests measure, all by accuracy.
_MEASURED = (None, "classification", "action", "vqa", "captioning", "referring")


def refuse_not_yet(file: PlanFile) -> None:
    """Raises BadPlan for settings that training would not honour."""
    mistakes = Mistakes(file.text)
    for location, what in _asked(file.plan):
        mistakes.add(location, f"{what} is not supported yet")
    mistakes.refuse()


def _asked(plan: Plan) -> list[tuple[Location, str]]:
    """Every setting that nothing reads yet, and what it asks for. One line each, to be deleted with its reason."""
    asked: list[tuple[bool, Location, str]] = [
        (plan.lora.rslora, ("lora", "rslora"), "rank-stabilised scaling"),
        (plan.lora.targets is not None, ("lora", "targets"), "a choice of layers"),
        (plan.lora.vision, ("lora", "vision"), "an adapter on the vision side"),
        (plan.order != ("given",), ("order",), "any order but `given`"),
        (plan.packing != "naive", ("packing",), "first-fit packing"),
        (plan.confidence is not None, ("confidence",), "deciding on a lower confidence bound"),
    ]
    for place, domain in enumerate(plan.domains):
        asked += [(wanted, ("domains", place, field), what) for wanted, field, what in _asked_by(domain)]
    return [(location, what) for wanted, location, what in asked if wanted]


def _asked_by(domain: DomainPlan) -> list[tuple[bool, str, str]]:
    return [
        (domain.data is not None, "data", "data other than a `source`"),
        (domain.teacher is not None, "teacher", "a teacher"),
        (domain.task not in _MEASURED, "task", f"the task {domain.task!r}"),
        (domain.metric not in (None, "accuracy"), "metric", f"the metric {domain.metric!r}"),
        (domain.head is not None, "head", "a choice of head"),
        (domain.labels is not None, "labels", "a list of labels"),
        (isinstance(domain.threshold, RelativeThreshold), "threshold", "a relative threshold"),
    ]
