"""Reading of hand-written YAML: every error is reported with its line, and nothing is silently ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from vlora.errors import BadPlan
from vlora.wording import yaml_errors

_SHOWN = 40  # characters of a value
_MOST_BITS = 63  # of an integer: no field needs more, and Python cannot print integers of thousands of digits


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
