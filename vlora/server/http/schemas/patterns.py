"""Patterns of JSON schemas in the dialect of the grammar library.

The two differ in classes, sets and repetitions: `\\S` of the library matches what is a space in Python, `[a&&b]` is an
intersection. A pattern is parsed by Python, as `jsonschema` does, and written without any of that.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_SPACE = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_CLASSES = {
    "DIGIT": ("0-9", r"\p{Nd}"),
    "WORD": ("0-9A-Za-z_", r"\p{L}\p{N}_"),
    "SPACE": (_SPACE, _SPACE + r"\x{1c}-\x{1f}\x{85}"),
}
"""Members of a class in both JavaScript and Python, and in one of them."""

# The library's own dates include 29 February of every year and the year 0.
_YEAR, _LEAP = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])", "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Patterns of formats."""


def translated(pattern: str, of_names: bool) -> str:
    """The pattern in the library's dialect.

    of_names: the result matches what Python matches, and not only texts on which Python and JavaScript agree: names
    without a match are subject to other schemas. Raises ValueError if the library lacks what the pattern needs.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            parsed: Any = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError):
        return pattern  # JavaScript's, such as \p{L}
    flags = _flags(parsed.state.flags)
    return f"(?{flags}:{_written(parsed, of_names)})" if flags else _written(parsed, of_names)


def _written(items: Iterable[Any], of_names: bool) -> str:
    text = ""
    for operation, value in items:
        match str(operation):
            case "LITERAL":
                text += _letter(value)
            case "NOT_LITERAL":
                text += f"[^{_letter(value)}]"
            case "ANY":
                text += "."
            case "IN":
                text += _set(value, of_names)
            case "BRANCH":
                text += f"(?:{'|'.join(_written(each, of_names) for each in value[1])})"
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                end = "" if str(most) == "MAXREPEAT" else most
                text += f"(?:{_written(inner, of_names)}){{{least},{end}}}"
            case "SUBPATTERN":
                _, added, removed, inner = value
                off = f"-{_flags(removed)}" if removed else ""
                text += f"(?{_flags(added)}{off}:{_written(inner, of_names)})"
            case "AT" if str(value).startswith("AT_BEGINNING"):
                text += "^"
            case "AT" if str(value).startswith("AT_END"):
                # In Python, $ matches before a final newline too.
                text += r"\n?$" if of_names and str(value) == "AT_END" else "$"
            case "AT":
                raise ValueError(r"\b or \B")
            case "ASSERT" | "ASSERT_NOT":
                raise ValueError("a lookaround")
            case "GROUPREF" | "GROUPREF_EXISTS":
                raise ValueError("a reference to a group")
            case other:
                raise ValueError(f"a {other.lower().replace('_', ' ')}")
    return text


def _set(members: Sequence[Any], of_names: bool) -> str:
    negated = str(members[0][0]) == "NEGATE"
    text = "[^" if negated else "["
    for operation, value in members[negated:]:
        if str(operation) == "LITERAL":
            text += _letter(value)
        elif str(operation) == "RANGE":
            text += f"{_letter(value[0])}-{_letter(value[1])}"
        else:
            *opposite, name = str(value).removeprefix("CATEGORY_").split("_")
            inside = _CLASSES[name][of_names or bool(opposite) != negated]
            text += f"[^{inside}]" if opposite else inside
    return text + "]"


def _letter(code: int) -> str:
    return chr(code) if chr(code).isalnum() and code < 128 else f"\\x{{{code:x}}}"


def _flags(flags: int) -> str:
    if flags & re.MULTILINE:
        raise ValueError("the flag m")
    return ("i" if flags & re.IGNORECASE else "") + ("s" if flags & re.DOTALL else "")
