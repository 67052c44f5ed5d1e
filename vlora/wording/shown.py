"""Short representations of values for error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

_MOST_CHARS = 40
_MOST_BITS = 256  # of an integer; Python refuses to print thousands of digits


def shown(value: Any) -> str:
    """A scalar's value, or a container's type and size."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() if value.bit_length() > _MOST_BITS:
            return f"a whole number of {value.bit_length()} bits"
        case int() | float():
            return repr(value)
        case str():
            return repr(value) if len(value) <= _MOST_CHARS else f"{value[:_MOST_CHARS]!r}..."
        case bytes() | bytearray() | memoryview():
            return f"{len(value)} bytes"
        case Mapping():
            return "an object"
        case Sequence() | Set():
            return f"a list of {counted(len(value))}"
    return f"of type {type(value).__name__}"


def counted(count: int, noun: str = "item") -> str:
    """ "1 item", "3 items"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
