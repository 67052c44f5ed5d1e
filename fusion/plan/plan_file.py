"""Reading a plan file: errors are reported together, with file, line and field."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pydantic import ValidationError

from fusion.plan.errors import Location, PlanErrors, PlanText
from fusion.plan.schema import Plan
from fusion.plan.yaml_text import read_yaml
from vlora.errors import BadPlan
from vlora.wording import pydantic_errors

# Fields with several forms. pydantic adds the form it tried after the field's name; the file has no such step.
_FORMS = ("data", "teacher", "threshold")


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """A plan with the text it was read from, so that later errors can be reported with their line."""

    plan: Plan
    text: PlanText


def read_plan(path: Path | str) -> Plan:
    """Read and check a plan file. Raises BadPlan with file, line and field."""
    return read_plan_file(path).plan


def read_plan_file(path: Path | str) -> PlanFile:
    """Like `read_plan`, with the line of each field. Raises BadPlan with file, line and field of every error."""
    path = Path(path)
    tree, content = read_yaml(path)
    if not isinstance(content, dict):
        raise BadPlan(f"{path}, line 1: a plan is a mapping with the field `domains`, found {type(content).__name__}")
    text = PlanText(path, tree)
    try:
        return PlanFile(Plan.model_validate(content, context={"folder": path.absolute().parent}), text)
    except ValidationError as error:
        errors = PlanErrors(text)
        found = error.errors()
        for entry in found:
            inside = any(other["loc"][:-1] == entry["loc"] for other in found)
            if entry["type"] != "too_short" or not inside:  # invalid items are not also reported as too few
                errors.add(pydantic_errors.described(entry), *_without_tags(entry["loc"]))
        errors.raise_if_any()
        raise


def _without_tags(location: Location) -> Location:
    kept: list[int | str] = []
    for before, step in zip((None, *location), location, strict=False):
        if before not in _FORMS:
            kept.append(step)
    return tuple(kept)
