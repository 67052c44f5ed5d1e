"""Reading a plan file into a pydantic model: errors are reported together, with file, line and field."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from vlora.errors import BadPlan
from vlora.plan_files.errors import Location, PlanErrors, PlanText
from vlora.plan_files.fields import PlanModel
from vlora.wording import pydantic_errors, yaml_errors

M = TypeVar("M", bound=PlanModel)

_SHOWN = 40  # characters of a value
_MOST_BITS = 63  # of an integer: no field needs more, and Python cannot print integers of thousands of digits


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
    return checked(content, model, text, path.absolute().parent, forms), text


def checked(content: Any, model: type[M], text: PlanText, folder: Path | None = None, forms: Collection[str] = ()) -> M:
    """A plan of values that were read. Raises BadPlan with the field of every error. Arguments: see `read_model`."""
    try:
        return model.model_validate(content, context={"folder": folder})
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


# Reading of hand-written YAML: every error is reported with its line, and nothing is silently ignored.


def read_yaml(path: Path) -> tuple[yaml.Node | None, Any]:
    """Read a file as nodes, which carry line numbers, and as values. Raises BadPlan with file and line."""
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadPlan(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadPlan(f"{path}: cannot be read: it is not UTF-8 text") from error
    try:
        return yaml.compose(source, Loader=_Loader), yaml.load(source, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        why = error.problem if isinstance(error, _Refused) else yaml_errors.problem(error)
        raise BadPlan(f"{path}, line {line}: not YAML: {why}") from error
    except RecursionError as error:
        raise BadPlan(f"{path}: not YAML: lists or mappings are nested too deeply to be read") from error


class _Refused(yaml.constructor.ConstructorError):
    """Raised for values that `_Loader` itself refuses."""


class _Loader(yaml.SafeLoader):
    """A SafeLoader that also refuses four things that PyYAML does not handle: a value that looks like a date or a
    number but is invalid (2026-02-30), which makes PyYAML raise a bare ValueError; an integer of any size;
    text that is not Unicode; and a duplicate key, of which PyYAML silently drops the first value."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value.bit_length() > _MOST_BITS:
                raise OverflowError(f"more than {_MOST_BITS} bits")
            if isinstance(value, str):
                value.encode()  # half of a surrogate pair, written as an escape, could not be printed or sent
            return value
        except (ValueError, OverflowError) as error:
            shown = str(node.value).encode(errors="backslashreplace").decode()
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
            raise _Refused(
                None, None, f"{shown} cannot be read ({error}); quote the value if it is text", node.start_mark
            ) from error

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:  # keys merged by `<<` are added later and may be overridden
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _Refused(None, None, f"duplicate field `{key.value}`", key.start_mark)
                seen.add(key.value)
        return node
