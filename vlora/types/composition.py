"""Names of adapters, and compositions: several adapters on one request, each with a weight, and how they are written.

The text of a composition is `a+b`, or `0.7*a+0.3*b` with weights; names of adapters therefore contain neither `+` nor
`*`. The delta of a composition is the weighted sum of the adapters' deltas.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vlora.errors import BadRequest

MAX_COMPOSED = 8  # adapters
MAX_WEIGHT = 100.0
RESERVED = "+*"
"""Characters that no adapter's name contains."""

MAX_NAME = 128
BASE, UNKNOWN, COMPOSED, OTHER = "base", "unknown", "composed", "other"
"""Label values of metrics: for requests without an adapter, with an unknown adapter and with a composition, and for the
names beyond a limit."""

_SHOWN = MAX_NAME  # characters of a text, which may be as long as a message


class WeightedName(NamedTuple):
    """An adapter of a composition, and the factor of its delta."""

    adapter: str
    weight: float


def name_problem(name: str) -> str | None:
    """Why no adapter may have this name; None if one may."""
    shown = f"adapter name {name[:MAX_NAME]!r} is invalid"
    if (
        not 0 < len(name) <= MAX_NAME
        or name != name.strip()
        or name.startswith(".")
        or not name.isprintable()
        or any(letter in name for letter in "@/\\" + RESERVED)
    ):
        return (
            f"{shown}: a name has 1 to {MAX_NAME} printable characters, no @, +, * or slash, no space at either end, "
            "and no dot at the beginning"
        )
    if (composed := unicodedata.normalize("NFC", name)) != name:
        return f"{shown}: it has letters and accents as separate characters ({name!a}); write {composed!a}"
    if name in (BASE, UNKNOWN, COMPOSED, OTHER):
        return f"{shown}: metrics count other requests under the label {name!r}; choose another name"
    return None


def is_composed(name: str) -> bool:
    """Whether a name is that of a composition, not of a single adapter."""
    return any(letter in name for letter in RESERVED)


def composed_of(name: str) -> tuple[WeightedName, ...]:
    """The adapters of a composition in order of name, or a single adapter with weight 1.

    Raises:
        BadRequest: The text is not a composition, or its weights are out of range.
    """
    if not is_composed(name):
        return (WeightedName(name, 1.0),)
    if (count := name.count("+") + 1) > MAX_COMPOSED:
        raise _bad(name, f"it names {count} adapters; at most {MAX_COMPOSED} can be composed")
    found: list[tuple[str, float]] = []
    for part in name.split("+"):
        weight, star, adapter = part.rpartition("*")
        found.append((adapter.strip(), _number(name, weight.strip(), adapter.strip()) if star else 1.0))
    return _checked(name, found)


def adapter_name(adapter: str | Mapping[str, float]) -> str:
    """The name of an adapter or of a composition, from its text or its weights by adapter.

    Equal compositions have equal names: adapters in order of name, each after its weight unless that is 1.

    Raises:
        BadRequest: As `composed_of`.
    """
    if isinstance(adapter, str):
        parts = composed_of(adapter)
    else:
        text = "+".join(map(str, adapter))
        if len(adapter) > MAX_COMPOSED:
            raise _bad(text, f"it names {len(adapter)} adapters; at most {MAX_COMPOSED} can be composed")
        parts = _checked(text, adapter.items())
    return "+".join(name if weight == 1 else f"{_text(weight)}*{name}" for name, weight in parts)


def _checked(text: str, parts: Iterable[tuple[str, float]]) -> tuple[WeightedName, ...]:
    found: dict[str, float] = {}
    for name, weight in parts:
        shown = f"{name!r:.{_SHOWN}}"
        if not isinstance(name, str) or not name or is_composed(name):
            raise _bad(text, f"{shown} is no adapter's name; write a+b, or 0.7*a+0.3*b with weights")
        if name in found:
            raise _bad(text, f"it names {shown} twice; give it one weight, as in 2*{name[:_SHOWN]}")
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise _bad(text, f"the weight of {shown} is of type {type(weight).__name__}; it must be a number")
        if not 0 < abs(weight) <= MAX_WEIGHT:
            limits = f"from -{MAX_WEIGHT:g} to {MAX_WEIGHT:g}, and not 0"
            raise _bad(text, f"the weight of {shown} is {_size(weight)}; it must be {limits}")
        found[name] = float(weight)
    if not found:
        raise _bad(text, "it names no adapter; write a+b, or 0.7*a+0.3*b with weights")
    return tuple(WeightedName(name, found[name]) for name in sorted(found))


def _number(text: str, weight: str, adapter: str) -> float:
    try:
        return float(weight)
    except ValueError as error:
        why = f"the weight {weight[:_SHOWN]!r} of {adapter[:_SHOWN]!r} is not a number; write 0.7*a+0.3*b"
        raise _bad(text, why) from error


def _size(weight: float) -> str:
    # Python refuses to print whole numbers of thousands of digits.
    return f"a whole number of {weight.bit_length()} bits" if isinstance(weight, int) and weight else f"{weight:g}"


def _text(weight: float) -> str:
    return str(int(weight)) if weight == math.trunc(weight) else repr(weight)


def _bad(text: str, why: str) -> BadRequest:
    return BadRequest(f"composition {text[:_SHOWN]!r} is invalid: {why}", field="adapter")
