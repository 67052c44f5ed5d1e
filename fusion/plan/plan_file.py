"""Reading a plan file: errors are reported together, with file, line and field."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fusion.plan.schema import Plan
from vlora.plan_files.errors import PlanText
from vlora.plan_files.reading import read_model

_FORMS = ("data", "teacher", "threshold")


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """A plan with the text it was read from, so that later errors can be reported with their line."""

    plan: Plan
    text: PlanText


def read_plan(path: Path | str) -> Plan:
    """Read and check a plan file. Raises BadPlan with file, line and field."""
    return read_plan_file(path).plan


def read_plan_file(path: Path | str | PlanFile) -> PlanFile:
    """Like `read_plan`, with the line of each field; a plan that was read already is returned.

    Raises BadPlan with file, line and field of every error.
    """
    if isinstance(path, PlanFile):
        return path
    return PlanFile(*read_model(path, Plan, needed="domains", forms=_FORMS))
