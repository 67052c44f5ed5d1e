"""The adapters of a folder that is replaced while a running server serves them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vlora.adapter_files import CONFIG_FILE, DOMAINS_FILE, HEAD_FILES, content_hash
from vlora.errors import listed
from vlora.types.composition import MAX_NAME

if TYPE_CHECKING:
    from vlora.client import Client


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
