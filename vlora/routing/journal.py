"""A record of a router's calls, and its replay: the decisions of a live cluster can be repeated without it."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from vlora.routing.placement import MoveCosts
from vlora.routing.router import Router
from vlora.routing.standing import Need, Report, Room

_CALLS: dict[str, Any] = {
    "join": tuple[str, Room, bool],
    "leave": tuple[str],
    "drain": tuple[str, bool],
    "bar": tuple[str, str, bool],
    "lack": tuple[str, str, str, bool],
    "began": tuple[str, str],
    "report": tuple[str, Report],
    "submit": tuple[Need],
    "ended": tuple[str],
    "grew": tuple[str, int],
    "refuse": tuple[float, float],
    "evict": tuple[str],
    "consolidate": tuple[int],
    "rebalance": tuple[float, MoveCosts, int],
    "replan": tuple[()],
    "advice": tuple[float],
}
"""The calls that are recorded, and their arguments."""


class RecordedRouter:
    """A router of which each call is written as a line of JSON: name, arguments, result.

    It has the methods and properties of `Router`. The first line has its settings.

    Args:
        write: called with each line.
        settings: arguments of `Router`, its rule by name.
    """

    def __init__(self, write: Callable[[bytes], object], **settings: Any) -> None:
        self._write = write
        self._router = Router(**settings)
        write(json.dumps(settings).encode())  # with infinity, which msgspec writes as null

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._router, name)
        if name not in _CALLS:
            return attribute
        signature = _signature(name)

        def call(*args: Any, **named: Any) -> Any:
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            result = attribute(*args, **named)
            line = name, list(map(_ordered, bound.arguments.values())), result
            self._write(msgspec.json.encode(line))
            return result

        return call


@functools.cache
def _signature(name: str) -> inspect.Signature:
    whole = inspect.signature(getattr(Router, name))
    return whole.replace(parameters=list(whole.parameters.values())[1:])  # without self


def _ordered(value: Any) -> Any:
    """An argument without sets: their order is not the same in each process."""
    if isinstance(value, Report) and value.adapters is not None:
        return (*value[:-1], sorted(value.adapters))
    return value


class Replayed(NamedTuple):
    """The outcome of a replay.

    Attributes:
        num_calls: calls with the recorded result.
        difference: of the first other call, its name, the recorded result and the present one; None if there is none.
    """

    num_calls: int
    difference: tuple[str, Any, Any] | None


def replay_calls(lines: Iterable[bytes]) -> Replayed:
    """Repeat the calls of a record with a new router, and compare the results."""
    remaining = iter(lines)
    router = Router(**json.loads(next(remaining)))
    num_calls = 0
    for line in remaining:
        name, arguments, recorded = msgspec.json.decode(line, type=tuple[str, msgspec.Raw, Any])
        result = msgspec.to_builtins(getattr(router, name)(*msgspec.json.decode(arguments, type=_CALLS[name])))
        if msgspec.json.encode(result) != msgspec.json.encode(recorded):
            return Replayed(num_calls, (name, recorded, result))
        num_calls += 1
    return Replayed(num_calls, None)
