"""The check that flags are not given twice with the same value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vlora.errors import BadRequest


def check_given_once(flags: Mapping[str, Sequence[str]]) -> None:
    """Check the values of flags by name. Raises BadRequest for one that is given more than once."""
    for flag, values in flags.items():
        if repeated := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
            raise BadRequest(f"{flag} {repeated[0]!r} is given more than once; give it once")
