"""Values that a front end, its driver and its head exchange. Imports no Ray."""

from __future__ import annotations

from typing import Any

import msgspec

from vlora.cluster.on_ray.actor import ActorSettings, Opened
from vlora.cluster.on_ray.settings import Folder
from vlora.types import ErrorValue


class HeadSettings(msgspec.Struct, frozen=True):
    """Settings of the head's process.

    Attributes:
        keeps_replicas: The replicas and the folder outlive its stdin.
    """

    folder: Folder
    command: tuple[str, ...]
    keeps_replicas: bool = False


class HeadReport(msgspec.Struct, frozen=True):
    """Ray has started, or has ended instead. problem: empty if it has started; otherwise its last lines."""

    problem: str


class Need(msgspec.Struct, frozen=True, kw_only=True):
    cpus: int
    gpus: int = 0
    memory_bytes: int = 0


class DriverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a driver.

    Attributes:
        connection: The arguments of `ray.init`.
        actors: By the names of all replicas that there may be.
        need: Of each replica, where there are several machines.
        homes: The keys of the machines of replicas that may run, by name.
        join_s: How long machines may take to join, at the start and after that of another Ray.
    """

    connection: dict[str, Any]
    actors: dict[str, ActorSettings]
    number: int
    log_file: str
    num_gpus: int = 0
    need: Need | None = None
    homes: dict[str, str] = {}
    join_s: float = 30.0


class Scale(msgspec.Struct, frozen=True, tag=True):
    """To a driver: another number of replicas."""

    number: int


class Restart(msgspec.Struct, frozen=True, tag=True):
    """To a driver: kill the processes of a replica, so that it is started again."""

    name: str


Order = Scale | Restart


class Located(msgspec.Struct, frozen=True, tag=True):
    name: str
    at: Opened


class Lost(msgspec.Struct, frozen=True, tag=True):
    """A replica's actor has ended; it is started again."""

    name: str
    cause: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A replica has not started; it is tried again. name: empty, if none can."""

    name: str
    error: ErrorValue


Event = Located | Lost | Failed


def replica_names(number: int) -> tuple[str, ...]:
    return tuple(f"replica-{index}" for index in range(number))
