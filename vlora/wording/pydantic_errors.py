"""Error messages for errors of pydantic, from its error types, which are stable; its messages are not used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vlora.wording.shown import counted, shown

EXPECTED = {
    "bool": "true or false",
    "bytes": "bytes",
    "dict": "an object",
    "finite_number": "a finite number",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "mapping": "an object",
    "model": "an object",
    "model_attributes": "an object",
    "none_required": "null",
    "path": "a path",
    "string": "a string",
    "tuple": "a list",
}
"""Expected value, by error type without its suffix."""

_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
    "multiple_of": ("multiple_of", "a multiple of"),
}
_KIND = re.compile(r"_(type|parsing|parsing_size|from_float)$")


def described(error: Mapping[str, Any], *, also: str = "") -> str:
    """The problem with a field, to follow its name: "is 17; it must be at most 16".

    Args:
        error: One of `ValidationError.errors()`.
        also: Another type that the field accepts, such as "a list".
    """
    kind, context, value = str(error["type"]), error.get("ctx", {}), error.get("input")
    expected = EXPECTED.get(_KIND.sub("", kind))
    if expected is not None:
        return f"is {shown(value)}; it must be {expected}{also and f' or {also}'}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = context[name]
        bound = int(bound) if isinstance(bound, float) and bound.is_integer() else bound
        return f"is {shown(value)}; it must be {words} {bound}"
    match kind:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return "is not a known field; check its spelling"
        case "value_error" | "assertion_error":
            return str(context["error"])
        case "literal_error" | "enum":
            words = f"it must be {context['expected']}, or {also}" if also else f"choose {context['expected']}"
            return f"is {shown(value)}; {words}"
        case "union_tag_invalid":
            field = str(context["discriminator"]).strip("'")
            return f"has {field} {shown(context['tag'])}; choose one of {context['expected_tags']}"
        case "union_tag_not_found":
            field = str(context["discriminator"]).strip("'")
            return f"has no {field}"
        case "too_short":
            return f"has {counted(context['actual_length'])}; it must have at least {context['min_length']}"
        case "too_long":
            count, noun = context.get("actual_length"), "character" if isinstance(value, str) else "item"
            many = f"more than {context['max_length']} items" if count is None else counted(count, noun)
            return f"has {many}; at most {context['max_length']} are allowed"
        case "string_too_short" | "string_too_long":
            bound, words = ("min_length", "at least") if kind.endswith("short") else ("max_length", "at most")
            length = len(value) if isinstance(value, str) else 0
            return f"has {counted(length, 'character')}; it must have {words} {context[bound]}"
        case "string_pattern_mismatch":
            return f"is {shown(value)}; it must match the pattern {context['pattern']}"
        case "string_unicode":
            return "contains an unpaired surrogate; send text that is valid Unicode"
        case "json_invalid":
            place = re.search(r"line (\d+) column (\d+)", str(context.get("error", "")))
            return "is not JSON" + (f": see line {place[1]}, column {place[2]}" if place else "")
    return f"is {shown(value)}, which is not accepted here"
