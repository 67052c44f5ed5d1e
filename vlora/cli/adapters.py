"""`vlora adapters`: list, load, unload and pin the adapters of a running server."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from vlora.adapter_files import CONFIG_FILE, DOMAINS_FILE, HEAD_FILES, content_hash
from vlora.cli.group import cli
from vlora.cli.options import long_flag, print_json, server_options
from vlora.cli.progress import waiting
from vlora.errors import listed
from vlora.types.composition import MAX_NAME

if TYPE_CHECKING:
    from vlora.client import Client
    from vlora.types import AdapterStatus


@cli.group(invoke_without_command=True)
@server_options
@click.pass_context
def adapters(context: click.Context, client: Client, as_json: bool) -> None:
    """List the adapters of a server with their domains and heads, or load, unload, pin and unpin one.

    \b
        vlora adapters --json
        vlora adapters load signs /srv/adapters/signs

    If the server requires tokens, changes require an admin token in VLORA_TOKEN.
    """
    if context.invoked_subcommand is None:
        _list(client, as_json=as_json)
        return
    for option in context.command.params:
        assert option.name is not None
        if context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            assert isinstance(option, click.Option)
            raise click.UsageError(f"write --{long_flag(option)} after {context.invoked_subcommand!r}", context)


@adapters.command("list")
@server_options
def list_adapters(client: Client, as_json: bool) -> None:
    """List the adapters of a server with their domains and heads.

    \b
        vlora adapters list --json
    """
    _list(client, as_json=as_json)


@adapters.command()
@click.argument("name")
@click.argument("path")
@server_options
def load(name: str, path: str, client: Client, as_json: bool) -> None:
    """Load the adapter folder PATH as NAME, and wait until it is served.

    \b
        vlora adapters load signs /srv/adapters/signs

    The folder is in the file system of the server's machine; a relative path starts at the current folder. If NAME is
    already registered, its content is replaced after the new adapter is read and validated.
    """
    with client, waiting(f"loading {name}"):
        status = client.load_adapter(name, os.path.abspath(os.path.expanduser(path)))
    _show(status, as_json=as_json)


@adapters.command()
@click.argument("name")
@click.option("--drain", is_flag=True, help="Let its running requests finish instead of cancelling them.")
@server_options
def unload(name: str, drain: bool, client: Client, as_json: bool) -> None:
    """Unregister the adapter NAME; its files stay.

    \b
        vlora adapters unload signs --drain
    """
    with client:
        client.unload_adapter(name, drain=drain)
    if as_json:
        print_json({"name": name, "drain": drain})
    else:
        click.echo(f"{name}  unloaded")


@adapters.command()
@click.argument("name")
@server_options
def pin(name: str, client: Client, as_json: bool) -> None:
    """Load the adapter NAME onto the device and keep it resident.

    \b
        vlora adapters pin signs
    """
    with client, waiting(f"pinning {name}"):
        status = client.pin_adapter(name)
    _show(status, as_json=as_json)


@adapters.command()
@click.argument("name")
@server_options
def unpin(name: str, client: Client, as_json: bool) -> None:
    """Allow the adapter NAME to be evicted from the device again.

    \b
        vlora adapters unpin signs
    """
    with client:
        status = client.pin_adapter(name, pinned=False)
    _show(status, as_json=as_json)


@contextlib.contextmanager
def replacing_served(client: Client, folder: Path) -> Iterator[None]:
    """A block that replaces the adapters in a folder, while a server on this machine serves them.

    The server reads the former contents before the block, so that it needs no file meanwhile, and the new ones after
    it; adapters that are no longer in the folder are unloaded. Requests in progress continue with the content with
    which they began.
    """
    served = {status.name: status for status in client.adapters()}
    former = {name: content_hash(path) for name, path in _in(folder).items() if name in served}
    for name, version in tuple(former.items()):
        if not served[name].loaded:
            client.load_adapter(name, folder.absolute() / name)
        elif served[name].version != version:
            del former[name]  # another folder's adapter
    yield
    new = _in(folder)

    lost = {name: {each.name for each in served[name].domains} - _domains(new[name]) for name in new.keys() & served}
    order = sorted(new, key=lambda name: len(lost.get(name, ())))  # those that lose domains follow the others
    loaded: set[str] = set()
    left = {f"{name}.next" for name in served.keys() & new} & (served.keys() - new.keys())  # by a run that failed
    try:
        for place, name in enumerate(order):
            for later in order[place + 1 :]:
                extra, moved = f"{later}.next", lost.get(name, set()) & _domains(new[later])
                if moved and extra not in loaded | new.keys() and len(extra) <= MAX_NAME:  # domains move both ways
                    client.load_adapter(extra, new[later].absolute())
                    loaded.add(extra)
                    left.add(extra)
            path, status = new[name], served.get(name)
            if status is not None and (former.get(name) or status.version) == content_hash(path):
                continue
            if status is not None and status.pinned:
                client.pin_adapter(name, False)
            client.load_adapter(name, path.absolute())
            if status is not None and status.pinned:
                client.pin_adapter(name)
            click.echo(f"{name}  {'loaded' if status is None else 'replaced'}", err=True)
        while left:
            client.unload_adapter(min(left), drain=True)
            left.remove(min(left))
    except BaseException:
        if left:
            click.echo(f"left on the server: {listed(left)}; run again, or unload them", err=True)
        raise
    for name in former.keys() - new.keys():
        client.unload_adapter(name, drain=True)
        click.echo(f"{name}  unloaded", err=True)


def _in(folder: Path) -> dict[str, Path]:
    return {file.parent.name: file.parent for file in sorted(folder.glob(f"[!.]*/{CONFIG_FILE}"))}


def _domains(folder: Path) -> set[str]:
    """The names of the domains, or of the heads, that an adapter's folder has."""
    for file, field in ((folder / DOMAINS_FILE, "domains"), (folder / HEAD_FILES[0], "heads")):
        if file.exists():
            return {one["name"] for one in json.loads(file.read_bytes())[field]}
    return set()


def _list(client: Client, *, as_json: bool) -> None:
    with client:
        found = client.adapters()
    for adapter in found:
        _show(adapter, as_json=as_json)
    if not found and not as_json:
        click.echo("no adapters")


def _show(adapter: AdapterStatus, *, as_json: bool) -> None:
    if as_json:
        print_json(adapter)
        return
    merge = "mergeable" if adapter.mergeable else "never merged"
    if not adapter.loaded:
        merge = f"cannot be served: {adapter.error}" if adapter.error else "read at first use"
    pinned = "  pinned" if adapter.pinned else ""
    click.echo(f"{adapter.name}  rank {adapter.rank}  {adapter.num_bytes / 2**20:.1f} MiB  {merge}{pinned}")
    for warning in adapter.warnings:
        click.echo(f"  warning: {warning}")
    for domain in adapter.domains:
        scores = {"head": domain.head_accuracy, "words": domain.words_accuracy}
        how = ", ".join(f"{way} {score:.3f}" for way, score in scores.items() if score is not None)
        click.echo(f"  domain {domain.name}  by {domain.answer}" + (f" ({how})" if how else ""))
    for head in adapter.heads:
        frames = f"{head.num_frames} frame{'s' * (head.num_frames != 1)}"
        click.echo(f"  head {head.name}  {head.task} over {frames}: {', '.join(head.labels)}")
