"""`vlora train`: submit, list and cancel the trainings of a running server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from vlora.cli.group import cli
from vlora.cli.progress import waiting
from vlora.cli.server_flags import json_option, print_json, server_option

if TYPE_CHECKING:
    from vlora.client import Client
    from vlora.types import TrainingStatus


@cli.group()
def train() -> None:
    """Train adapters in a running server, beside its requests.

    \b
        vlora train submit plan.yaml
        vlora train status
        vlora train cancel signs

    If the server requires tokens, changes require an admin token in VLORA_TOKEN.
    """


@train.command()
@click.argument("plan")
@server_option
@json_option
def submit(plan: str, client: Client, as_json: bool) -> None:
    """Begin or continue the trainings of the file PLAN.

    \b
        vlora train submit plan.yaml

    The file is in the file system of the server's machine; a relative path starts at the current folder. Trainings that
    were cancelled or have failed continue from their checkpoints.
    """
    with client, waiting(f"reading {plan}"):
        found = client.train(os.path.abspath(os.path.expanduser(plan)))
    for status in found:
        _show(status, as_json=as_json)


@train.command()
@server_option
@json_option
def status(client: Client, as_json: bool) -> None:
    """List the trainings of a server with their progress.

    \b
        vlora train status --json
    """
    with client:
        found = client.trainings()
    for one in found:
        _show(one, as_json=as_json)
    if not found and not as_json:
        click.echo("no trainings")


@train.command()
@click.argument("name")
@server_option
@json_option
def cancel(name: str, client: Client, as_json: bool) -> None:
    """End the training NAME; submitting its plan again continues it.

    \b
        vlora train cancel signs
    """
    with client:
        found = client.cancel_training(name)
    _show(found, as_json=as_json)


def _show(status: TrainingStatus, *, as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    parts = [f"{status.name}  {status.state}", f"step {status.step} of {status.num_steps}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.held_out_before is not None:
        after = "" if status.held_out_after is None else f", after {status.held_out_after:.4f}"
        parts.append(f"held out before {status.held_out_before:.4f}{after}")
    if reason := status.error or status.waiting:
        parts.append(reason)
    click.echo("  ".join(parts))
