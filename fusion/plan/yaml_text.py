"""YAML as people write it by hand: whatever cannot be read is told with its line, and nothing is read over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from vlora.errors import BadPlan
from vlora.wording import yaml_errors

_SHOWN = 40  # characters of a value
_MOST_BITS = 63  # of a whole number: nothing counts further, and Python itself cannot print what has thousands


def read_yaml(path: Path) -> tuple[yaml.Node | None, Any]:
    """A file as nodes, which know their lines, and as values. Raises BadPlan naming file and line."""
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
        raise BadPlan(f"{path}: not YAML: lists or mappings lie in each other too deep to be read") from error


class _Refused(yaml.constructor.ConstructorError):
    """What `_Loader` itself refuses, in this project's words."""


class _Loader(yaml.SafeLoader):
    """Safe YAML, but for three things that PyYAML lets pass: a value that looks like a date or a number and cannot be
    one (2026-02-30) breaks its reader, a whole number may be of any size, and of a key that stands twice the first
    value is lost without a word."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value.bit_length() > _MOST_BITS:
                raise OverflowError(f"more than {_MOST_BITS} bits")
            return value
        except (ValueError, OverflowError) as error:
            shown = str(node.value)
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
            raise _Refused(
                None, None, f"{shown} cannot be read ({error}); put quotes around what is text", node.start_mark
            ) from error

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:  # what `<<` merges in comes later, and may be overridden
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _Refused(
                        None, None, f"the field `{key.value}` stands here for the second time", key.start_mark
                    )
                seen.add(key.value)
        return node
