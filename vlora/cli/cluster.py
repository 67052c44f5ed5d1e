"""`vlora cluster`: the replicas of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from vlora.cli.group import cli
from vlora.cli.options import print_json, server_options
from vlora.cli.progress import waiting
from vlora.errors import BadRequest

if TYPE_CHECKING:
    from vlora.client import Client
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
    """Show, drain, resume and scale the replicas of a server that was started with --replicas or --ray.

    \b
        vlora cluster status
        vlora cluster drain replica-0

    If the server requires tokens, changes require an admin token in VLORA_TOKEN.
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
        place = f"  {replica.address} (node {replica.node[:8]}, actor {replica.actor[:8]}, process {replica.pid})"
        click.echo(f"{replica.name}  {replica.state}  {text}{place if replica.address else ''}")
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
    """Have NUMBER replicas, at most --replicas LEAST:MOST of the server, or let the load decide.

    \b
        vlora cluster scale 3
        vlora cluster scale auto

    A number holds until the next call, whatever the load; auto begins with the present number, and keeps at least
    LEAST.

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
