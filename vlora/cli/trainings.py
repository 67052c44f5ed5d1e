"""`vlora train`: trainings of a running server, and versions of the adapters that learn."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from vlora.cli.group import cli
from vlora.cli.options import print_json, server_options
from vlora.cli.progress import waiting
from vlora.errors import BadRequest

if TYPE_CHECKING:
    from vlora.client import Client
    from vlora.types import TrainingStatus
    from vlora.types.learning import AdapterVersion, Comparison, LearningStatus


@cli.group()
def train() -> None:
    """Train adapters in a running server, beside its requests.

    \b
        vlora train submit plan.yaml
        vlora train status
        vlora train cancel signs
        vlora train versions signs

    If the server requires tokens, changes require an admin token in VLORA_TOKEN.
    """


@train.command()
@click.argument("plan")
@server_options
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
@server_options
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
@server_options
def cancel(name: str, client: Client, as_json: bool) -> None:
    """End the training NAME; submitting its plan again continues it.

    \b
        vlora train cancel signs
    """
    with client:
        found = client.cancel_training(name)
    _show(found, as_json=as_json)


@train.command()
@click.argument("name")
@server_options
def versions(name: str, client: Client, as_json: bool) -> None:
    """List the versions of the learning adapter NAME, the newest first.

    \b
        vlora train versions signs
    """
    with client:
        found = {one.name: one for one in client.learning()}
    if name not in found:
        known = ", ".join(found) or "none"
        raise BadRequest(f"adapter {name!r} does not learn; learning: {known}")
    _show_learning(found[name], as_json=as_json)


@train.command()
@click.argument("name")
@click.option("--version", help="A version on disk; its first digits suffice. Default: the last one not promoted.")
@click.option("--path", help="A folder in the file system of the server's machine, instead.")
@click.option("--force", is_flag=True, help="Serve it at once, without evaluation.")
@server_options
def promote(name: str, version: str | None, path: str | None, force: bool, client: Client, as_json: bool) -> None:
    """Evaluate a version of the learning adapter NAME in the background, and serve it if it is better.

    \b
        vlora train promote signs --path out/adapters/signs
        vlora train promote signs --version 3f9a --force
    """
    with client:
        folder = None if path is None else os.path.abspath(os.path.expanduser(path))
        found = client.promote(name, version=version, path=folder, force=force)
    _show_learning(found, as_json=as_json)


@train.command()
@click.argument("name")
@click.option("--version", help="A version on disk; its first digits suffice. Default: the one before.")
@server_options
def rollback(name: str, version: str | None, client: Client, as_json: bool) -> None:
    """Serve an earlier version of the learning adapter NAME.

    \b
        vlora train rollback signs
    """
    with client:
        found = client.roll_back(name, version)
    _show_learning(found, as_json=as_json)


def _show_learning(status: LearningStatus, *, as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    left = "" if status.until_training is None else f", {status.until_training} until the next training"
    click.echo(f"{status.name}  {status.doing}  {status.num_corrected} corrections{left}")
    for one in status.versions:
        click.echo(f"  {_described(one)}")


def _described(version: AdapterVersion) -> str:
    parts = [f"{version.version[:12]}  {version.state}", *([version.origin] if version.origin else [])]
    for what, compared in (("live", version.live), ("trusted", version.trusted)):
        if compared is not None and compared.count:
            parts.append(f"{what} {_shares(compared)}")
    if version.num_answers:
        parts.append(f"{version.num_wrong} of {version.num_answers} answers corrected")
    return "  ".join(parts)


def _shares(compared: Comparison) -> str:
    return (
        f"{compared.candidate_share:.3f} (bound {compared.lower:.3f}) against {compared.present_share:.3f} "
        f"on {compared.count}"
    )


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
    if status.num_bad:
        parts.append(f"{status.num_bad} records set aside")
    if reason := status.error or status.waiting:
        parts.append(reason)
    click.echo("  ".join(parts))
    for reason in status.bad:
        click.echo(f"  set aside: {reason}")
    if status.bad and status.num_bad > len(status.bad):
        click.echo(f"  and {status.num_bad - len(status.bad)} more")
