"""Options of several commands: headings in the help, flags as names, values that are given once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from vlora.errors import BadRequest

RULES = ("placed", "punica", "where_it_is", "least_loaded", "round_robin")
"""Of `vlora.routing`, which takes long to import."""


class HeadedOption(click.Option):
    """heading: the heading in `--help`."""

    def __init__(self, *args: Any, heading: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


def headed(heading: str, *names: str, **settings: Any) -> Any:
    """As `click.option`, under a heading."""
    return click.option(*names, cls=HeadedOption, heading=heading, **settings)


def long_flag(option: click.Option) -> str:
    """The flag without its dashes, "max-tokens": its name in config files, and in the environment in capitals."""
    return next(flag for flag in option.opts if flag.startswith("--")).removeprefix("--")


def write_headed(context: click.Context, formatter: click.HelpFormatter, params: list[click.Parameter]) -> None:
    """Write options by heading, in order of each heading's first option; those without one come last, as "Options"."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        record = param.get_help_record(context)
        if record is not None:
            rows.setdefault(param.heading if isinstance(param, HeadedOption) else "Options", []).append(record)
    for heading in sorted(rows, key="Options".__eq__):
        with formatter.section(heading):
            formatter.write_dl(rows[heading])


def check_given_once(flags: Mapping[str, Sequence[str]]) -> None:
    """Check the values of flags by name. Raises BadRequest for one that is given more than once."""
    for flag, values in flags.items():
        if repeated := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
            raise BadRequest(f"{flag} {repeated[0]!r} is given more than once; give it once")
