"""A record of a router's calls, and its replay: the decisions of a live cluster can be repeated without it."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple, cast

import msgspec

from vlora.errors import BadConfig, BadRequest
from vlora.routing.placement import MoveCosts
from vlora.routing.replica_load import Need, Report, Room
from vlora.routing.router import Router

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
    "recall": tuple[int],
    "rebalance": tuple[float, MoveCosts, int],
    "replan": tuple[()],
    "advice": tuple[float],
}
"""The calls that are recorded, and their arguments."""

_Weights = dict[str, Annotated[float, msgspec.Meta(gt=0)]]


class _Settings(msgspec.Struct, forbid_unknown_fields=True):
    """The first line: arguments of `Router`, its rule by name."""

    rule: str = "placed"
    over: float | None = None
    weights: _Weights | None = None
    tenant_weights: _Weights | None = None


class RecordedRouter:
    """A router of which each call is written as a line of JSON: name, arguments, result.

    It has the methods and properties of `Router`. The first line has its settings.

    Args:
        settings: arguments of `Router`, its rule by name.
    """

    def __init__(self, write: Callable[[bytes], object], **settings: Any) -> None:
        self._write = write
        self._router = Router(**settings)
        write(json.dumps(settings).encode())  # with infinity, which msgspec writes as null

    @property
    def as_router(self) -> Router:
        return cast(Router, self)

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
        return value._replace(adapters=sorted(value.adapters))  # type: ignore[arg-type]
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
    """Repeat the calls of a record with a new router, and compare the results.

    Raises:
        BadRequest: A line is none of a record; the message has its number.
    """
    router: Router | None = None
    num_calls = 0
    for number, line in enumerate(lines, 1):
        try:
            if router is None:
                router = Router(**msgspec.structs.asdict(msgspec.convert(json.loads(line), _Settings)))
                continue
            name, arguments, recorded = msgspec.json.decode(line, type=tuple[str, msgspec.Raw, Any])
            given = msgspec.json.decode(arguments, type=_CALLS[name])
        except (ValueError, TypeError, KeyError, RecursionError, msgspec.MsgspecError, BadConfig) as error:
            raise BadRequest(f"line {number} is no line of a record of routing: {error}") from error
        try:
            result = msgspec.to_builtins(getattr(router, name)(*given))
        except (KeyError, AssertionError) as error:  # its replica or request is in no earlier line
            return Replayed(num_calls, (name, recorded, f"{type(error).__name__}: {error}"))
        if msgspec.json.encode(result) != msgspec.json.encode(recorded):
            return Replayed(num_calls, (name, recorded, result))
        num_calls += 1
    if router is None:
        raise BadRequest("the record of routing is empty; it has a line when the server has started")
    return Replayed(num_calls, None)


def replay_file(path: str) -> Replayed:
    """As `replay_calls`, for a file. An incomplete last line, of a process that was killed, is left out.

    Raises:
        BadConfig: The file cannot be read, or a line is none of a record.
    """
    try:
        with open(path, "rb") as file:
            return replay_calls(line for line in file if line.endswith(b"\n"))
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror}") from error
    except BadRequest as error:
        raise BadConfig(f"{path}: {error}") from error
