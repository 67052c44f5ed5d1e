"""Values that a front end, its keeper and its head exchange. Imports no Ray."""

from __future__ import annotations

import msgspec

from vlora.cluster.on_ray.actor import ActorSettings, Opened
from vlora.cluster.on_ray.settings import Folder, Ports
from vlora.types import ErrorValue


class HeadSettings(msgspec.Struct, frozen=True):
    """Settings of the head's process."""

    folder: Folder
    ports: Ports


class HeadReport(msgspec.Struct, frozen=True):
    """Ray has started, or has ended instead. problem: empty if it has started; otherwise its last lines."""

    problem: str


class KeeperSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a keeper.

    Attributes:
        actors: By the names of all replicas that there may be.
        number: Of the first ones that there are.
        log_file: For messages of Ray itself.
        num_gpus: Of each replica.
    """

    ports: Ports
    actors: dict[str, ActorSettings]
    number: int
    log_file: str
    num_gpus: int = 0


class Scale(msgspec.Struct, frozen=True):
    """To a keeper: another number of replicas."""

    number: int


class Located(msgspec.Struct, frozen=True, tag=True):
    """A replica serves."""

    name: str
    at: Opened


class Lost(msgspec.Struct, frozen=True, tag=True):
    """A replica's actor has ended; Ray starts it again."""

    name: str
    cause: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A replica has not started; it is tried again. name: empty, if none can."""

    name: str
    error: ErrorValue


Event = Located | Lost | Failed


def replica_names(number: int) -> tuple[str, ...]:
    return tuple(f"replica-{index}" for index in range(number))
