"""Names that adapters may have: unambiguous in requests, compositions, paths, URLs, logs and metrics."""

from __future__ import annotations

import unicodedata

from vlora.types.composition import is_composed

MAX_NAME = 128
BASE, UNKNOWN, COMPOSED, OTHER = "base", "unknown", "composed", "other"
"""Label values of metrics: for requests without an adapter, with an unknown adapter and with a composition, and for the
names beyond a limit."""


def name_problem(name: str) -> str | None:
    """Why no adapter may have this name; None if one may."""
    shown = f"adapter name {name[:MAX_NAME]!r} is invalid"
    if (
        not 0 < len(name) <= MAX_NAME
        or name != name.strip()
        or name.startswith(".")
        or not name.isprintable()
        or any(letter in name for letter in "@/\\")
        or is_composed(name)
    ):
        return (
            f"{shown}: a name has 1 to {MAX_NAME} printable characters, no @, +, * or slash, no space at either end, "
            "and no dot at the beginning"
        )
    if (plain := unicodedata.normalize("NFKC", name)) != name:
        return f"{shown}: it has characters that look like others; write {plain!r}"
    if name in (BASE, UNKNOWN, COMPOSED, OTHER):
        return f"{shown}: metrics count other requests under the label {name!r}; choose another name"
    return None
