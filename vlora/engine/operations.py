"""What engines are asked beside the verbs of `vlora.operations`. `perform` is what an engine does for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Union

import msgspec

from vlora import operations
from vlora.engine.snapshot import EngineSnapshot
from vlora.operations import CancelTraining, GetStats, ListTrainings, Operation, PinAdapter, UnloadAdapter
from vlora.types import AdapterStatus, RequestOutput

if TYPE_CHECKING:
    from vlora.engine.engine import Engine

ADAPTERS_PER_REPLY = 250


class RegisterAdapters(Operation, frozen=True):
    """paths: by name. versions: the content hashes that they must have, by name."""

    paths: dict[str, str]
    versions: dict[str, str] = msgspec.field(default_factory=dict)


class LoadAdapter(operations.LoadAdapter, frozen=True):
    """version: the content hash that the folder must have; empty: any."""

    version: str = ""


class KeepAdapters(Operation, frozen=True):
    """From now on, keep these versions by name when other content replaces them, and no others.

    Returns those of them that the engine has.
    """

    result = dict[str, tuple[str, ...]]
    versions: dict[str, tuple[str, ...]]


class ListAdapters(Operation, frozen=True):
    """Returns the first `ADAPTERS_PER_REPLY` adapters with names after `after`; a full list would delay a step."""

    result = tuple[AdapterStatus, ...]
    after: str = ""


class Train(operations.Train, frozen=True):
    """Returns when the plan's files were read. reopen: also those that were cancelled or have failed.

    Raises:
        BadPlan: The plan or its data cannot be used.
        BadRequest: The engine cannot train, the model lacks a target, or the name of a training is in use.
    """

    reopen: bool = True


class GetSnapshot(Operation, frozen=True):
    result = EngineSnapshot
    since: int


EngineOperation: Any = Union[*(it for it in vars().values() if isinstance(it, type) and Operation in it.__mro__[1:])]
"""Those above, and those of `vlora.operations` that are imported by name."""


def perform(engine: Engine, operation: Operation, send: Callable[[tuple[RequestOutput, ...]], object]) -> Any:
    """Run an operation between two steps; the result, or a future of it that a later step completes.

    Args:
        send: Called with the last outputs of requests that the operation ends, before this returns.
    """
    trainings = engine.parts.trainings
    match operation:
        case RegisterAdapters(paths, versions):
            return engine.register_adapters(paths, versions)
        case LoadAdapter(name, path, version):
            return engine.load_in_background(name, path, version)
        case KeepAdapters(versions):
            return engine.keep_adapters(versions)
        case UnloadAdapter(name, drain):
            return send(engine.unload_adapter(name, drain))
        case PinAdapter(name, pinned):
            return engine.pin_in_background(name) if pinned else engine.pin_adapter(name, False)
        case ListAdapters(after):
            return engine.adapters(after, ADAPTERS_PER_REPLY)
        case Train(plan, reopen):
            return trainings.submit(plan, reopen=reopen)
        case ListTrainings():
            return trainings.statuses()
        case CancelTraining(name):
            return trainings.cancel(name)
        case GetStats():
            return engine.stats()
        case GetSnapshot(since):
            return engine.snapshot(since)
        case _:
            raise AssertionError(f"no engine performs {type(operation).__name__}")
