"""The options of `vlora serve` for several engines."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from vlora.cli.cluster_options import RULES
from vlora.cli.options import HeadedOption
from vlora.errors import BadConfig

if TYPE_CHECKING:
    from vlora.cluster.nodes.plan import ClusterPlan

_SECONDS = click.FloatRange(min=0, min_open=True, max=1e9)
# Name in `ReplicaOptions`, type, default, help.
_OPTIONS: tuple[tuple[str, Any, Any, str], ...] = (
    ("replicas", int, 1, "Number of engines on this machine; more than one needs Ray."),
    ("max_replicas", int, None, "Limit of `vlora cluster scale` and of --autoscale.  [default: --replicas]"),
    ("autoscale", None, False, "Add replicas under load, up to --max-replicas, and release them down to --replicas."),
    ("scale_up_s", _SECONDS, 2.0, "Seconds that requests wait before --autoscale adds a replica."),
    ("scale_down_s", _SECONDS, 60.0, "Seconds that the others could carry the load before one is released."),
    ("routing_rule", click.Choice(RULES), "placed", "Which replica gets the next request."),
    (
        "routing_journal",
        click.Path(),
        None,
        "Record routing in this file, up to 256 MiB, for `vlora simulate --replay`.",
    ),
    (
        "ship_adapters",
        None,
        False,
        "With --cluster: send adapters' files to machines that lack them, as `ship_adapters: true` of the plan.",
    ),
)


class ReplicaOptions(NamedTuple):
    """The values."""

    replicas: int
    max_replicas: int | None
    autoscale: bool
    scale_up_s: float
    scale_down_s: float
    routing_rule: str
    routing_journal: str | None
    ship_adapters: bool

    @property
    def several(self) -> bool:
        """Whether there may be more than one engine."""
        return max(self.replicas, self.max_replicas or 1) > 1


def replica_options(command: Any) -> Any:
    """Add the options."""
    for name, kind, default, text in reversed(_OPTIONS):
        command = click.option(
            f"--{name.replace('_', '-')}",
            cls=HeadedOption,
            heading="Replicas",
            type=kind,
            is_flag=kind is None,
            default=default,
            show_default=bool(default),
            help=text,
        )(command)
    return command


def take_replica_options(
    settings: dict[str, Any],
    cluster: ClusterPlan | None = None,
    *,
    learn: str | None = None,
    serve_base: Sequence[str] = (),
) -> ReplicaOptions:
    """Remove the values of these options from all settings of the command, and return them, checked.

    Args:
        settings: By name.
        cluster: The plan of several machines, which has the number of replicas.
        learn: Plan of learning adapters, which are trained.
        serve_base: Addresses at which the engine serves its weights.

    Raises:
        BadConfig: A number is below 1, over the limit, or none; several engines have a plan of trainings, as replicas
            would train the same adapters in the same folder, or one address for their weights; Ray cannot be used,
            which is not imported; or an option has no effect.
    """
    given = ReplicaOptions(**{name: settings.pop(name) for name, *_ in _OPTIONS})
    number, most = given.replicas, given.max_replicas
    if number < 1:
        raise BadConfig(f"--replicas is {number}; at least one engine serves")
    if most is not None and most < number:
        raise BadConfig(f"--max-replicas is {most}, below --replicas {number}; set it to {number} or more")
    most = most or number
    for name in ("scale_up_s", "scale_down_s"):
        if math.isnan(getattr(given, name)):  # which click compares with no limit
            raise BadConfig(f"--{name.replace('_', '-')} is nan; set a number of seconds above 0")
    if cluster is not None:
        if given.autoscale and cluster.replicas.limit == cluster.replicas.number:
            raise BadConfig("--autoscale needs `replicas.most` of the plan above `replicas.number`")
    elif given.autoscale and most == number:
        raise BadConfig(f"--autoscale needs a --max-replicas above --replicas {number}")
    for option, plan in (("--train", settings.get("train")), ("--learn", learn)):
        if plan is not None and (most > 1 or cluster is not None):
            now = "--cluster" if cluster is not None else most
            raise BadConfig(f"{option} {plan} needs --replicas 1 (now {now}): one engine trains; serve it separately")
    if serve_base and (most > 1 or cluster is not None):
        now = "--cluster" if cluster is not None else most
        raise BadConfig(
            f"--serve-base {serve_base[0]} needs --replicas 1 (now {now}): one engine listens at an address; start "
            "`vlora base serve` as well"
        )
    if given.ship_adapters and cluster is None:
        raise BadConfig("--ship-adapters needs --cluster: replicas of one machine read the same files")
    if given.routing_journal is not None:
        if most == 1 and cluster is None:
            raise BadConfig("--routing-journal needs --replicas 2 or more: one engine has no router")
        given = given._replace(routing_journal=os.path.abspath(os.path.expanduser(given.routing_journal)))
    if most > 1:
        from vlora.cluster.on_ray.settings import check_ray

        check_ray(f"--replicas {most}")
    return given
