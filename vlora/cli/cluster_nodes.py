"""`vlora cluster up`, `join` and `down`: the machines of a cluster, and its plan."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from vlora.cli.cluster import cluster
from vlora.cli.extras import needs, require
from vlora.cli.server_flags import json_option, print_json
from vlora.cli.settings import model_path
from vlora.errors import BadConfig, BadPlan
from vlora.logging_format import LEVEL_VARIABLE, configure

if TYPE_CHECKING:
    from vlora.cluster.nodes.node import Machine
    from vlora.cluster.nodes.plan import ClusterPlan

_END_S = 30.0


def _resource_options(command: Any) -> Any:
    command = click.option(
        "--gpus", type=click.IntRange(min=0), help="GPUs for replicas.  [default: those that this process may use]"
    )(command)
    return click.option(
        "--cpus", type=click.IntRange(min=0), help="Cores for replicas; 0: none run here.  [default: all cores]"
    )(command)


@cluster.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--host", help="Address of this machine for others.  [default: that of `head` in the plan]")
@_resource_options
@needs("cluster")
def up(plan: Path, host: str | None, cpus: int | None, gpus: int | None) -> None:
    """Run the head of the cluster of PLAN (YAML, see docs/cluster.md) on this machine until interrupted.

    \b
        vlora cluster up cluster.yaml
        vlora cluster up cluster.yaml --cpus 0

    A token file is made if there is none; copy it to the other machines. With --cpus 0 no replica runs here.
    """
    from vlora.cluster.nodes.head import address_of, facts_of, run_head
    from vlora.cluster.nodes.plan import read_cluster_plan
    from vlora.cluster.nodes.token import create_token, read_token

    _check_ray()
    found = read_cluster_plan(plan)
    machine = _machine(host or address_of(found), cpus, gpus)
    facts = facts_of(found, plan_model(plan, found), machine.host, machine.resolve)
    if create_token(found.token_file):
        click.echo(f"made the token file {found.token_file}")
    token = read_token(found.token_file)
    _run(lambda stop: run_head(found, token, facts, machine, announce=click.echo, stop=stop))


@cluster.command()
@click.argument("address", metavar="HOST:PORT")
@click.option(
    "--token-file", type=click.Path(path_type=Path), required=True, help="Copy of the head's token file, mode 0600."
)
@click.option("--host", default="", help="Address of this machine for others.  [default: the one that the head sees]")
@_resource_options
@needs("cluster")
def join(address: str, token_file: Path, host: str, cpus: int | None, gpus: int | None) -> None:
    """Join the cluster with its head at HOST:PORT, and run replicas on this machine until interrupted.

    \b
        vlora cluster join 10.0.0.1:18870 --token-file cluster-token

    The model must be on this machine as on the head, and so must the adapters, unless the plan has `ship_adapters`.
    Versions of vlora, Ray and Python must be the head's.
    """
    from vlora.cluster.nodes.node import run_node
    from vlora.cluster.nodes.plan import parse_address
    from vlora.cluster.nodes.token import read_token

    _check_ray()
    try:
        head = parse_address(address)
    except ValueError as error:
        raise BadConfig(f"the head's address {error}") from error
    token = read_token(token_file)
    machine = _machine(host, cpus, gpus)
    if not machine.resources.cpus:
        raise BadConfig("--cpus is 0; a machine without cores runs no replicas")
    _run(lambda stop: run_node(head, token, machine, announce=click.echo, stop=stop))


@cluster.command()
@json_option
@needs("cluster")
def down(as_json: bool) -> None:
    """End what this user runs of clusters on this machine: front end, node and head, and nothing else.

    \b
        vlora cluster down

    Replicas on this machine end with them, also those of a head that was killed; their requests continue on other
    machines.
    """
    from vlora.cluster.nodes.runs import end, end_left, running

    found = running()
    for run in found:
        if not end(run, _END_S):
            raise BadConfig(f"process {run.pid}, the {run.kind} of {run.address}, has not ended after {_END_S:g} s")
        if not as_json:
            click.echo(f"ended the {run.kind} of {run.address}")
    for run in end_left():
        if (run.kind, run.address) not in [(each.kind, each.address) for each in found]:
            found.append(run)
            if not as_json:
                click.echo(f"ended what an earlier {run.kind} of {run.address} had left")
    if as_json:
        print_json({"ended": [{"kind": run.kind, "address": run.address} for run in found]})
    elif not found:
        click.echo("nothing of a cluster runs on this machine")


def _check_ray() -> None:
    from vlora.cluster.on_ray.settings import check_ray

    check_ray("a cluster")


def _machine(host: str, cpus: int | None, gpus: int | None) -> Machine:
    from vlora.cluster.nodes.node import Machine
    from vlora.cluster.on_ray.settings import Resources
    from vlora.engine.host_resources import default_threads

    if host:
        try:
            found = ipaddress.IPv4Address(host)
        except ValueError as error:
            raise BadConfig(f"--host is {host!r}; write the IPv4 address of this machine for others") from error
        if found.is_unspecified:
            raise BadConfig(f"--host is {host}, which others cannot reach; write the address of this machine for them")
    resources = Resources(default_threads() if cpus is None else cpus, visible_gpus() if gpus is None else gpus)
    return Machine(host, resources, lambda model: model_path(model, "the model"))


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """The number of NVIDIA GPUs that this process may use."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([each for each in chosen.split(",") if each.strip() and each.strip() != "-1"])
    return sum(re.fullmatch(r"nvidia\d+", file.name) is not None for file in devices.iterdir())


def _run(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run until interrupted or terminated."""
    configure(os.environ | {LEVEL_VARIABLE: os.environ.get(LEVEL_VARIABLE, "warning")})

    async def until_stopped() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await main(stop)

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # its lines may go to a file
    asyncio.run(until_stopped())


REPLACED = {
    "model": "--model",
    "adapters": "--adapter",
    "folder": "--adapters",
    "replicas": "--replicas",
    "max_replicas": "--max-replicas",
    "train": "--train",
}


def read_cluster(file: Path) -> tuple[ClusterPlan, str, dict[str, str]]:
    """The plan of a cluster, its model and its adapters. Ray is not imported.

    Raises:
        BadPlan: The plan is invalid.
        BadConfig: An option is given that the plan replaces, or Ray cannot be used.
    """
    context = click.get_current_context()
    for name, option in REPLACED.items():
        if context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None):
            raise BadConfig(f"--cluster and {option} are given; the plan {file} decides that, so omit the option")
    require("cluster")
    from vlora.cluster.nodes.plan import absolute_adapters, read_cluster_plan
    from vlora.cluster.on_ray.settings import check_ray

    check_ray("--cluster")
    plan = read_cluster_plan(file)
    return plan, plan_model(file, plan), absolute_adapters(plan)


def plan_model(file: Path, plan: ClusterPlan) -> str:
    """The model of a plan: a folder relative to the plan, or a name. The same on every machine.

    Raises:
        BadPlan: There is no such folder.
    """
    folder = file.absolute().parent / Path(plan.model).expanduser()
    if folder.is_dir():
        return os.path.abspath(folder)
    try:
        model_path(plan.model, "`model`")
    except BadConfig as error:
        raise BadPlan(f"{file}: {error}") from error
    return plan.model
