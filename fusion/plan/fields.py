"""Types of a fusion plan's fields."""

from __future__ import annotations

import os

from pydantic import ValidationInfo

from fusion.synthetic.sources import BUILT_IN
from vlora.plan_files.fields import Number, PlanModel, PlanPath, Whole

__all__ = ["Number", "PlanModel", "PlanPath", "Whole", "next_to_plan"]


def next_to_plan(name: str, info: ValidationInfo) -> str:
    """The full path of a folder next to the plan file; any other name unchanged."""
    folder = (info.context or {}).get("folder")
    if folder is None or name == "embedded" or name in BUILT_IN or not os.path.isdir(folder / name):
        return name
    return str(folder / name)
