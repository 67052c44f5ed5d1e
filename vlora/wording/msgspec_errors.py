"""Error messages for errors of msgspec. msgspec has no error types, so its messages are parsed."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from vlora.wording.shown import shown

_NOUNS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "bytes": "bytes",
    "array": "a list",
    "object": "an object",
}
_PLACE = re.compile(r" - at `(?P<key>key` in `)?\$?(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+)\]")
_EXPECTED = re.compile(
    r"^Expected `(?P<kinds>[^`]+)`(?: of length (?P<length>(?:[<>]= )?\d+))?(?: (?P<bound>[<>]= .+))?"
    r"(?:, got (?P<got>.+))?$"
)
_BOUNDS = {"<=": "at most", ">=": "at least"}
_FIELD = re.compile(r"^Object (?P<what>missing required|contains unknown) field `(?P<name>[^`]*)`$")
_GIVEN = {**_NOUNS, "bool": "a truth value"}
_MISSING = object()


def described(error: Exception, name: str = "", value: Any = _MISSING) -> str:
    """The problem, beginning with the field: "temperature is 'hot'; it must be a number".

    Args:
        error: A `msgspec.ValidationError`, or an OverflowError of a conversion.
        name: Name of the whole value. Without it, messages begin with the name of the field.
        value: The converted value; the message shows its wrong part. Omit it for secrets: only the type is shown then.
    """
    message = str(error)
    place = _PLACE.search(message)
    path = place["path"] if place else ""
    message = message[: place.start()] if place else message
    field = (name + path).removeprefix(".")
    if found := _FIELD.match(message):
        field = f"{field}: " if field else ""
        if found["what"].startswith("missing"):
            return f"{field}the field {found['name']!r} is missing"
        return f"{field}unknown field {found['name'][:40]!r}; check its spelling"
    field = f"a key of {field or 'the object'}" if place and place["key"] else field or "the value"
    wrong = _part(value, path) if not (place and place["key"]) else _MISSING
    if not (found := _EXPECTED.match(message)):
        given = "" if wrong is _MISSING else f" ({shown(wrong)})"
        return f"{field} is out of range{given}" if "range" in message else f"{field} is not accepted here{given}"
    kinds = [_NOUNS.get(kind, kind) for kind in found["kinds"].split(" | ") if kind != "null"] or ["null"]
    expected = " or ".join(kinds)
    if found["length"]:
        expected += f" of {_words(found['length'])} items"
    elif found["bound"]:
        expected += f" of {_words(found['bound'])}"
    if wrong is not _MISSING:
        given = f"is {shown(wrong)}; "
    elif found["got"] and found["got"].strip("`") in _GIVEN:
        given = f"is {_GIVEN[found['got'].strip('`')]}; "
    else:
        return f"{field} must be {expected}"
    return f"{field} {given}it must be {expected}"


def _words(bound: str) -> str:
    sign, _, number = bound.rpartition(" ")
    return f"{_BOUNDS[sign]} {float(number):g}" if sign else number


def _part(value: Any, path: str) -> Any:
    """The value at a path such as `.stop[0]`, or _MISSING."""
    if value is _MISSING:
        return _MISSING
    at = 0
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            return _MISSING
        try:
            value = value[step["name"] if step["name"] is not None else int(step["index"])]
        except (LookupError, TypeError):
            return _MISSING
        at = step.end()
    return value


REFUSED = (msgspec.ValidationError, OverflowError)
"""The errors of a conversion; OverflowError is for an integer outside the range of a float."""
