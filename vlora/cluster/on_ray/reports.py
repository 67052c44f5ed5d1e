"""Values that a front end, its driver, the actors and the process of a local Ray exchange. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vlora.cluster.on_ray.settings import Folder
from vlora.cluster.replica import ReplicaSettings
from vlora.types import ErrorValue

RENEWED = 3
"""Exit code of a driver that another one has to replace: after a restart of Ray's head it is not told of actors."""


_DEFAULT_RECONNECT_S = 60.0


class LocalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the process that runs a Ray on this machine.

    Attributes:
        num_cpus: What replicas may take of it, whatever the machine has.
    """

    folder: Folder
    num_cpus: int


class LocalReport(msgspec.Struct, frozen=True):
    """Ray has started, or has ended instead.

    Attributes:
        address: Of its control service.
        problem: Why it has not started.
    """

    address: str
    problem: str


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A front end that uses a namespace.

    Attributes:
        key: Of one run of it.
        settings: A hash of all that two front ends of one service have in common.
        address, port, tls: Where other front ends connect to it; port 0: nowhere.
    """

    key: str
    settings: str
    model: str
    host: str
    pid: int
    address: str = ""
    port: int = 0
    tls: bool = False

    def __str__(self) -> str:
        return f"a server of model {self.model!r} (process {self.pid} on {self.host})"


class DriverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a driver.

    Attributes:
        connection: More arguments of `ray.init`, beside the address and the namespace.
        need: What a replica takes of its node, by Ray's names.
        actor: The options of each actor.
        replica: The settings of each replica. They have its secret, so they go to actors in a call.
        number: Replicas that there are to be.
        checks_head: Whether to find out how long replicas outlive Ray's head.
        scales: Whether Ray's autoscaler is to have nodes for the replicas before they need them.
    """

    address: str
    namespace: str
    connection: dict[str, Any]
    service: Service
    need: dict[str, float]
    labels: dict[str, str]
    actor: dict[str, Any]
    replica: ReplicaSettings
    number: int
    folder: Folder
    checks_head: bool
    scales: bool


# -- from actors ------------------------------------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A replica serves. pid: of its actor. tls: whether it has a certificate."""

    host: str
    port: int
    tls: bool
    pid: int
    replica_pid: int
    engine_pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A replica's process has ended, or was not started. error: why."""

    error: ErrorValue
    served: bool


class ActorReport(msgspec.Struct, frozen=True):
    """What has become of a replica.

    Attributes:
        number: Changes with the state.
        state: None while the replica starts, and before its first start.
        lines: Of its log, since the last report.
    """

    number: int
    state: Opened | Ended | None
    lines: tuple[str, ...]


# -- to a driver ------------------------------------------------------------------------------------------------------


class Scale(msgspec.Struct, frozen=True, tag=True):
    """Another number of replicas."""

    number: int


class Listens(msgspec.Struct, frozen=True, tag=True):
    """Other front ends can connect to this one, at the address of its node. The driver waits for this."""

    port: int
    tls: bool


class Restart(msgspec.Struct, frozen=True, tag=True):
    """Kill a replica, if this is still its process, so that it is started again. moves: on another node."""

    name: str
    replica_pid: int
    moves: bool = False


Order = Scale | Listens | Restart


# -- from a driver ----------------------------------------------------------------------------------------------------


class Found(msgspec.Struct, frozen=True, tag=True):
    """The driver can use Ray. address: of this node."""

    address: str


class Follows(msgspec.Struct, frozen=True, tag=True):
    """Another front end owns the service; its replicas have this secret."""

    service: Service
    secret: bytes


class Owns(msgspec.Struct, frozen=True, tag=True):
    """This front end owns the service: its driver holds the replicas.

    Attributes:
        secret: Of the replicas, which may have been started by another front end.
        term: Larger than that of each owner before.
    """

    secret: bytes
    term: int


class Located(msgspec.Struct, frozen=True, tag=True):
    """node: Ray's id of it."""

    name: str
    at: Opened
    node: str
    actor: str


class Lost(msgspec.Struct, frozen=True, tag=True):
    """A replica has ended; it is started again."""

    name: str
    cause: str


class Draining(msgspec.Struct, frozen=True, tag=True):
    """Ray is going to end the node of a replica, which is to move to another one."""

    name: str
    node: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A replica has not started, and is tried again; or, without a name, none can, and the driver ends."""

    name: str
    error: ErrorValue


class NoRoom(msgspec.Struct, frozen=True, tag=True):
    """A replica waits for a node. what: it needs, and what the nodes have; empty: it has a node."""

    name: str
    what: str


class Logged(msgspec.Struct, frozen=True, tag=True):
    """Lines of a replica's log."""

    name: str
    lines: tuple[str, ...]


class HeadFacts(msgspec.Struct, frozen=True, tag=True):
    """Attributes:
    keeps_state: Whether Ray's head goes on with its state after a restart; None: not known.
    reconnect_s: How long the nodes of replicas wait for it, at least.
    """

    keeps_state: bool | None
    reconnect_s: float

    @property
    def warning(self) -> str:
        """That replicas end soon after Ray's head; empty if they do not."""
        if self.keeps_state is False:
            return (
                f"Ray's head keeps its state in memory: if it ends, all nodes and replicas end {self.reconnect_s:g} s "
                "later, also if it starts again; docs/cluster.md shows how it keeps its state"
            )
        if self.keeps_state and self.reconnect_s <= _DEFAULT_RECONNECT_S:
            return (
                f"Ray's nodes wait {self.reconnect_s:g} s for their head; if it is away for longer, all replicas end; "
                "set RAY_gcs_rpc_server_reconnect_timeout_s=600 where nodes start"
            )
        return ""


Event = Found | Follows | Owns | Located | Lost | Draining | Failed | NoRoom | Logged | HeadFacts


def replica_names(number: int) -> tuple[str, ...]:
    return tuple(f"replica-{index}" for index in range(number))


def missing(
    name: str,
    need: Mapping[str, float],
    labels: Mapping[str, str],
    nodes: Sequence[Mapping[str, Any]],
    free: Mapping[str, Mapping[str, float]],
) -> str:
    """Why no node has room for a replica, with what each has; empty if one has.

    nodes, free: of `ray.nodes` and `available_resources_per_node`.
    """
    shown = []
    for node in sorted((each for each in nodes if each["Alive"]), key=lambda each: str(each["NodeManagerAddress"])):
        own, total, left = node.get("Labels", {}), node["Resources"], free.get(node["NodeID"], {})
        if other := {key: own.get(key, "none") for key, value in labels.items() if own.get(key) != value}:
            shown.append(f"{node['NodeManagerAddress']} has the labels {_labels(other)}")
            continue
        short = [key for key, number in need.items() if left.get(key, 0) < number]
        if not short:
            return ""
        parts = [f"{_amount(key, total.get(key, 0))} ({_number(key, left.get(key, 0))} free)" for key in short]
        shown.append(f"{node['NodeManagerAddress']} has {', '.join(parts)}")
    needed = ", ".join(_amount(key, number) for key, number in need.items()) + (
        f" and a node with the labels {_labels(labels)}" if labels else ""
    )
    return f"no node of Ray has room for {name}, which needs {needed}: {'; '.join(shown) or 'it has no nodes'}"


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def _number(key: str, number: float) -> str:
    return f"{number / 2**30:.3g} GiB" if key == "memory" else f"{number:g}"


def _amount(key: str, number: float) -> str:
    return f"{_number(key, number)}{' of memory' if key == 'memory' else f' {key}'}"
