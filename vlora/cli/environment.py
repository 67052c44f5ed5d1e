"""Rejects environment variables that resemble options but match none, so that typos are not ignored."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

import click

from vlora.cli.options import long_flag
from vlora.errors import BadConfig

_NO_OPTIONS = ("VLORA_CONFIG", "VLORA_TOKEN", "VLORA_ADMIN_TOKEN")
# Variables that Kubernetes and Docker links set for a service with a name that begins with vlora.
_OF_SERVICES = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?$|_(NAME|ENV_\w+)$")


def refuse_unknown(group: click.Group, prefix: str, environ: Mapping[str, str]) -> None:
    """Check that some command reads every variable with this prefix.

    Args:
        group: the group of all commands.
        prefix: prefix of the variables, without the trailing underscore.
        environ: the environment.

    Raises:
        BadConfig: names the first unknown variable and the closest known one.
    """
    known = {*_NO_OPTIONS, *_variables(group, prefix)}
    for name in sorted(environ):
        if not name.startswith(f"{prefix}_") or name in known or _is_of_a_service(name, environ[name]):
            continue
        own = {each.removeprefix(f"{prefix}_"): each for each in known}
        match = difflib.get_close_matches(name.removeprefix(f"{prefix}_"), own, 1)
        hint = f"did you mean {own[match[0]]}?" if match else "unset it"
        raise BadConfig(f"no command reads the environment variable {name}; {hint}")


def _variables(group: click.Group, prefix: str) -> Iterator[str]:
    for name, command in group.commands.items():
        own = f"{prefix}_{name.upper().replace('-', '_')}"
        if isinstance(command, click.Group):
            yield from _variables(command, own)
        for option in command.params:
            if not isinstance(option, click.Option):
                continue
            given = option.envvar
            yield from [given] if isinstance(given, str) else given or ()
            yield f"{own}_{long_flag(option).replace('-', '_').upper()}"


def _is_of_a_service(name: str, value: str) -> bool:
    found = _OF_SERVICES.search(name)
    # A misspelt option may also end in _PORT; the service variables contain an address.
    return found is not None and (not name.endswith("_PORT") or "://" in value or name.endswith("_SERVICE_PORT"))
