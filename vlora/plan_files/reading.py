"""Reading a plan file into a pydantic model: errors are reported together, with file, line and field."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from vlora.errors import BadPlan
from vlora.plan_files.errors import Location, PlanErrors, PlanText
from vlora.plan_files.fields import PlanModel
from vlora.plan_files.yaml_text import read_yaml
from vlora.wording import pydantic_errors

M = TypeVar("M", bound=PlanModel)


def read_model(path: Path | str, model: type[M], *, needed: str, forms: Collection[str] = ()) -> tuple[M, PlanText]:
    """Read and check a plan file.

    Args:
        model: The plan's schema. Its validators find the plan's folder in their context, as `folder`.
        needed: The field that every such plan has, for the error of a file that is no mapping.
        forms: Fields with several forms. pydantic adds the form it tried after the field's name; the file has no such
            step.

    Returns:
        The plan, and its text for later errors with their line.

    Raises:
        BadPlan: The file cannot be read or is no such plan; with file, line and field of every error.
    """
    path = Path(path)
    tree, content = read_yaml(path)
    if not isinstance(content, dict):
        raise BadPlan(f"{path}, line 1: a plan is a mapping with the field `{needed}`, found {type(content).__name__}")
    text = PlanText(path, tree)
    try:
        return model.model_validate(content, context={"folder": path.absolute().parent}), text
    except ValidationError as error:
        errors = PlanErrors(text)
        found = error.errors()
        for entry in found:
            depth = len(entry["loc"])
            inside = any(len(other["loc"]) > depth and other["loc"][:depth] == entry["loc"] for other in found)
            if entry["type"] != "too_short" or not inside:  # invalid items are not also reported as too few
                errors.add(pydantic_errors.described(entry), *_without_tags(entry["loc"], forms))
        errors.raise_if_any()
        raise


def _without_tags(location: Location, forms: Collection[str]) -> Location:
    kept: list[int | str] = []
    for before, step in zip((None, *location), location, strict=False):
        if before not in forms:
            kept.append(step)
    return tuple(kept)
