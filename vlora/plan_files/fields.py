"""Types of a plan's fields: strict models, numbers, and paths relative to the plan file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo

from vlora.types.composition import name_problem
from vlora.wording.shown import shown


def _in_plan_folder(path: Path, info: ValidationInfo) -> Path:
    """Paths in a plan file are relative to its folder, not to the working directory."""
    folder = (info.context or {}).get("folder")
    return path if folder is None else folder / path


PlanPath = Annotated[Path, AfterValidator(_in_plan_folder)]


def _usable_name(name: str) -> str:
    if (problem := name_problem(name)) is not None:
        raise ValueError(problem)
    return name


AdapterName = Annotated[str, AfterValidator(_usable_name)]
"""A name under which an adapter will be served."""


def _not_a_switch(value: Any) -> Any:
    if isinstance(value, bool):  # Python takes true as 1, and YAML reads `yes` as true
        raise ValueError(f"is {shown(value)}; it must be a number")
    return value


def check_names(names: Iterable[str], what: str) -> None:
    """Raises ValueError if one occurs twice. what: the entries, in the plural."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"several {what} are named {', '.join(twice)}; each needs its own name")


Whole = Annotated[int, BeforeValidator(_not_a_switch)]
Number = Annotated[float, BeforeValidator(_not_a_switch)]


class PlanModel(BaseModel):
    # A misspelt field must not silently mean its default.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
