"""`vlora cluster`: the replicas of a running server, and the machines on which they run."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from vlora.cli.extras import needs, require
from vlora.cli.group import cli
from vlora.cli.options import json_option, print_json, server_options
from vlora.cli.progress import waiting
from vlora.cli.settings import model_path
from vlora.errors import BadConfig, BadPlan, BadRequest
from vlora.logging_format import LEVEL_VARIABLE, configure

if TYPE_CHECKING:
    from vlora.client import Client
    from vlora.cluster.nodes.node import Machine
    from vlora.cluster.nodes.plan import ClusterPlan
    from vlora.types.replicas import AdapterPlace

_WAIT_S = 5.0  # of one call, far below the timeout of calls


class _NumberOrAuto(click.ParamType):
    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["auto"]:
        if value == "auto":
            return "auto"
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor auto.", param, ctx)


@cli.group()
def cluster() -> None:
    """Show, drain, resume and scale the replicas of a server that was started with --replicas or --cluster.

    \b
        vlora cluster status
        vlora cluster drain replica-0

    `up` and `join` make a cluster of several machines, which `vlora serve --cluster` serves; `down` ends this machine's
    part of it. If the server requires tokens, changes require an admin token in VLORA_TOKEN.
    """


@cluster.command()
@click.option("--adapters", "of_adapters", is_flag=True, help="Show where each adapter is, and why it cannot be used.")
@server_options
def status(client: Client, of_adapters: bool, as_json: bool) -> None:
    """Show the replicas, their queue, and what happened to requests; or the adapters of each replica.

    \b
        vlora cluster status --json
        vlora cluster status --adapters

    An adapter is pending on a replica that is not as desired yet, also while its files are sent there, registered until
    its content is read, then in the memory of the host or of the device. A replica that has failed an adapter gets no
    requests of it, and tries again.
    """
    with client:
        if of_adapters:
            _show_adapters(client.cluster_adapters(), as_json=as_json)
            return
        found = client.cluster()
    if as_json:
        print_json(found)
        return
    for replica in found.replicas:
        text = replica.cause or _counted(replica.num_requests, "request")
        if replica.num_failed_adapters:
            text += f"  {_counted(replica.num_failed_adapters, 'adapter')} failed, see --adapters"
        click.echo(f"{replica.name}  {replica.state}  {text}")
    click.echo(
        f"{_counted(found.num_waiting, 'request')} waiting; since the start "
        f"{_counted(found.num_deaths, 'replica')} lost, {found.num_resubmitted} resubmitted, {found.num_moves} moved"
    )
    if (scaling := found.scaling) is not None:
        who = "automatically" if scaling.automatic else "by operators"
        click.echo(f"scaled {who}: {_counted(scaling.number, 'replica')}, {scaling.least} to {scaling.most}")
        if scaling.decided_s is not None:
            click.echo(f"last change {scaling.decided_s:.0f} s ago: {scaling.decision}")
        if scaling.problem:
            click.echo(scaling.problem)


@cluster.command()
@click.argument("name")
@server_options
def drain(name: str, client: Client, as_json: bool) -> None:
    """Move the requests of the replica NAME to others, and wait until it has none.

    \b
        vlora cluster drain replica-0

    It gets no further requests until it is resumed, also after a restart of its engine. Requests that no other replica
    could take end where they are. An interrupt ends the wait only.
    """
    with client, waiting(f"draining {name}"):
        while not client.drain_replica(name, wait_s=_WAIT_S):
            pass
    _show(name, "drained", as_json=as_json)


@cluster.command()
@click.argument("name")
@server_options
def resume(name: str, client: Client, as_json: bool) -> None:
    """Send requests to the drained replica NAME again.

    \b
        vlora cluster resume replica-0
    """
    with client:
        client.resume_replica(name)
    _show(name, "resumed", as_json=as_json)


@cluster.command()
@click.argument("number", type=_NumberOrAuto())
@server_options
def scale(number: int | Literal["auto"], client: Client, as_json: bool) -> None:
    """Have NUMBER replicas, at most --max-replicas of the server, or let the load decide.

    \b
        vlora cluster scale 3
        vlora cluster scale auto

    A number holds until the next call, whatever the load; auto begins with the present number, and keeps at least
    --replicas of the server.

    Further ones are started. The last ones are drained, and end once they have no requests. An interrupt ends the wait,
    and leaves what drains drained; another number then resumes it. The wait ends with an error if another call sets
    another number meanwhile.
    """
    with client, waiting(f"scaling to {number}"):
        while not client.scale(number, wait_s=_WAIT_S):
            scaling = client.cluster().scaling
            if scaling is not None and (scaling.automatic or scaling.number != number):
                who = "automatically" if scaling.automatic else "by an operator"
                raise BadRequest(
                    f"the change to {_counted(int(number), 'replica')} was replaced by another one: "
                    f"{_counted(scaling.number, 'replica')}, set {who}"
                )
    if as_json:
        print_json({"num_replicas": number})
    else:
        click.echo("automatic" if number == "auto" else _counted(number, "replica"))


def _show_adapters(places: tuple[AdapterPlace, ...], *, as_json: bool) -> None:
    if as_json:
        print_json(places)
        return
    for place in places:
        shown = [place.adapter, place.replica, place.state, place.version, "pinned" * place.pinned, place.cause]
        click.echo("  ".join(filter(None, shown)))


def _show(name: str, done: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"name": name, "done": done})
    else:
        click.echo(f"{name}  {done}")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


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
