"""The settings of one of several machines for the replicas on it: its address, its ports and its files.

A node writes it to a file of its folder, of which an environment variable of Ray's workers has the path. So nothing of
it passes through Ray, and an actor has the settings of whichever machine it runs on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from vlora.cluster.on_ray.settings import (
    GPUS_VARIABLE,
    NODE_VARIABLE,
    THREADS_VARIABLE,
    Folder,
    is_free,
    replica_environment,
)
from vlora.cluster.process_lock import locked
from vlora.errors import BadConfig


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One machine, for one run of its node.

    Attributes:
        key: Names the machine, also for a later Ray.
        host: Other machines reach it at this address.
        first_port, last_port: For replicas to listen on.
        cert_file, key_file: Of the replicas.
        model: The model's folder here, or its hub name.
        variables: Those of the node's environment that Ray changes for its workers.
    """

    key: str
    folder: str
    host: str
    first_port: int
    last_port: int
    cert_file: str
    key_file: str
    model: str
    num_gpus: int
    variables: dict[str, str]

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> NodeSettings | None:
        """The node of this process; None on a Ray of one machine."""
        path = environ.get(NODE_VARIABLE)
        return None if path is None else msgspec.json.decode(Path(path).read_bytes(), type=cls)

    @classmethod
    def of(cls, folder: Folder) -> NodeSettings:
        """The node of a folder. Raises OSError or MsgspecError if it has none."""
        return msgspec.json.decode(Path(folder.node_file).read_bytes(), type=cls)

    def environ(self, slot: int, num_gpus: int) -> dict[str, str | None]:
        """The variables of the replica in a slot that differ from those of Ray's workers."""
        return {
            **replica_environment(Folder(self.folder), self.variables, place=slot, num_gpus=num_gpus),
            NODE_VARIABLE: None,
        }


class Slot(NamedTuple):
    """A replica's share of a machine, which the process that has `file` open holds, in any way until its end.

    Attributes:
        place: Among the machine's replicas, which decides its GPUs.
    """

    place: int
    port: int
    file: int


@contextlib.contextmanager
def taken_slot(node: NodeSettings, num_gpus: int) -> Iterator[Slot]:
    """A free slot, which is held at least until the end of the block.

    A replica outlives its actor and Ray, so its slot is a lock that it inherits: no later Ray gives its GPUs away.

    Raises:
        BadConfig: All slots or all ports are in use.
    """
    ports = range(node.first_port, node.last_port + 1)
    number = node.num_gpus // num_gpus if num_gpus else len(ports)
    for index in range(number):
        if (file := locked(f"{node.folder}/slot-{index}")) is None:
            continue
        try:
            yield Slot(index, _free_port(node, [*ports[index:], *ports[:index]]), file)
        finally:
            os.close(file)
        return
    what = f"{node.num_gpus} GPUs" if num_gpus else f"{len(ports)} door_ports"
    raise BadConfig(f"{node.host} has {what}, which {number} replicas use; let another machine join, or use fewer")


def _free_port(node: NodeSettings, ports: Iterable[int]) -> int:
    if (port := next(filter(is_free, ports), None)) is not None:
        return port
    raise BadConfig(
        f"all ports from {node.first_port} to {node.last_port} of {node.host} are in use; choose other door_ports in "
        "the plan"
    )


def write_node(folder: Folder, node: NodeSettings) -> None:
    """Write a node to its file, whole: actors of an earlier Ray may read it."""
    temporary = f"{folder.node_file}.new"
    Path(temporary).write_bytes(msgspec.json.encode(node))
    os.replace(temporary, folder.node_file)


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in (THREADS_VARIABLE, GPUS_VARIABLE) if name in environ}
