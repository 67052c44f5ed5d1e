"""The options of `vlora simulate` for many replicas."""

from __future__ import annotations

from typing import Any

import click

RULES = ("placed", "punica", "where_it_is", "least_loaded", "round_robin")
_SECONDS = click.FloatRange(min=0)
# Name in `ClusterConfig`, type, default, help.
_SETTINGS: tuple[tuple[str, Any, Any, str], ...] = (
    ("replicas", click.IntRange(min=1), 1, "Number of replicas that share the load."),
    ("rule", click.Choice(RULES), "placed", "Which replica gets the next request."),
    (
        "over",
        click.FloatRange(min=1),
        None,
        "Requests that a replica takes at a time, in batches; others wait in the router. Default: 1.5; 1 under punica; "
        "no limit under least_loaded and round_robin.",
    ),
    ("max_replicas", click.IntRange(min=1), None, "Add replicas up to this number, and release them, by the load."),
    ("start_s", _SECONDS, 15.0, "Seconds until an added replica serves."),
    ("mtbf_s", _SECONDS, 0.0, "Mean seconds between failures of a replica; 0: none fail."),
    ("detect_s", _SECONDS, 0.0, "Seconds from a failure until the router learns of it."),
    ("restart_s", _SECONDS, 15.0, "Seconds from then until a replacement serves."),
    ("report_s", _SECONDS, 0.0, "Period of the replicas' reports to the router; 0: at every event."),
    ("report_age_s", _SECONDS, 0.0, "A report arrives up to so many seconds after it was made."),
    ("rebalance_s", _SECONDS, 0.0, "Period of moving requests to replicas that finish early; 0: never."),
)


def cluster_options(command: Any) -> Any:
    """Add the options."""
    command = click.option(
        "--quick/--full",
        default=None,
        help="Simulate stretches of unmerged steps, or each step. Default: --quick with more than 16 replicas.",
    )(command)
    for name, kind, default, text in reversed(_SETTINGS):
        flag = f"--{name.replace('_', '-')}"
        shown = default is not None
        command = click.option(flag, type=kind, default=default, show_default=shown, help=text)(command)
    return command


def take_cluster_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of these options, except --quick, from all settings of the command, and return them."""
    return {name: settings.pop(name) for name, *_ in _SETTINGS}
