"""What callers without an admin token see: adapters and causes, without paths and addresses of the server."""

from __future__ import annotations

import functools
import logging
import re
import secrets
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from vlora.config import Token
from vlora.errors import AdapterChanged, BadAdapter, EngineDead, StepFailed, VLoraError
from vlora.server.security.access import is_admin
from vlora.types import ErrorValue

T = TypeVar("T")

log = logging.getLogger(__name__)

ANYONE = Token(name="anyone", secret=secrets.token_hex())
"""A caller without an admin token."""

_WITH_PATHS = frozenset(each.code for each in (BadAdapter, AdapterChanged, EngineDead, StepFailed, VLoraError))
"""Codes of errors with causes of the server. Those about a request contain what the caller has sent."""

_NAME = re.compile(r"""(?:adapter|replica) (?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"): """)
_URL = re.compile(r"\b\w+://\S*")
_FOLDERS = re.compile(rf"(?<![\w.:/])/(?=\S)(?:(?:(?!{_URL.pattern}).)*/)?", re.DOTALL)
_ADDRESSES = re.compile(
    r"""
    \('[^']*',\ \d+(?:,\ \d+)*\)                      # of Python's errors of connections
    | \[[\da-fA-F.]*:[\da-fA-F:.]*(?:%\w+)?\](?::\d+)?
    | \b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b
    | (?<![\w./-])[a-zA-Z\d][\w.-]*:\d{4,5}\b          # four digits: the lines of source files mostly have fewer
    """,
    re.VERBOSE,
)


def without_places(message: str) -> str:
    """A message without folders and addresses of the server. URLs stay, except for addresses in them.

    Messages about files begin with the path and a colon, after the names of replica and adapter. A path may contain
    spaces and colons, so parts with a slash are removed up to a part without one. Of a path elsewhere the name of the
    file stays. Rather too much is removed than too little.
    """
    names = ""
    while (found := _NAME.match(message)) is not None:
        names, message = names + found[0], message[found.end() :]
    while "/" in _URL.sub("", (parts := message.partition(": "))[0]) and parts[1]:
        message = parts[2]
    return names + _ADDRESSES.sub("[address]", _FOLDERS.sub("", message))


def to_vlora_error(error: Exception) -> VLoraError:
    """The error to send. An error of any other type is internal: it is logged, and only its call fails."""
    if isinstance(error, VLoraError):
        return error
    log.error("a call failed", exc_info=error)
    return VLoraError(f"internal server error ({type(error).__name__}: {error}); see the server log")


def named(error: ErrorValue, adapter: str | None) -> VLoraError:
    """The error of a request. One of an adapter's files names the adapter, since its path is not for every caller."""
    if error.code == BadAdapter.code and adapter is not None and repr(adapter) not in error.message:
        error = ErrorValue(error.code, f"adapter {adapter!r}: {error.message}")
    return error.to_exception()


def value_for(error: ErrorValue, caller: Token | None) -> ErrorValue:
    """The error that a caller may see. None: a caller on a server without tokens, an operator."""
    if is_admin(caller) or error.code not in _WITH_PATHS:
        return error
    return ErrorValue(error.code, without_places(error.message))


def error_for(error: VLoraError, caller: Token | None) -> VLoraError:
    """As `value_for`, for an exception."""
    value = ErrorValue.of(error)
    shown = value_for(value, caller)
    return error if shown == value else shown.to_exception()


def shown_to(value: T, caller: Token | None) -> T:
    """A value with what this caller may see of it, by the metadata of its fields (`vlora.types.visibility`)."""
    shown: T = value if is_admin(caller) else _public(value)
    return shown


def _public(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_public, value))
    if isinstance(value, ErrorValue):
        return value_for(value, ANYONE)
    if not isinstance(value, msgspec.Struct):
        if isinstance(value, list | dict | set | frozenset):
            raise AssertionError(f"a {type(value).__name__} of values that not every caller may see; use a tuple")
        return value
    changes = {name: change(found) for name, change in _changes(type(value)).items() if (found := getattr(value, name))}
    return msgspec.structs.replace(value, **changes) if changes else value


@functools.cache
def _changes(kind: type) -> dict[str, Callable[[Any], Any]]:
    """How the fields of a struct are shown to callers without an admin token, of those that may differ."""
    found: dict[str, Callable[[Any], Any]] = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        extra: dict[str, Any] = next((meta.extra for meta in getattr(hint, "__metadata__", ()) if meta.extra), {})
        if "others_see" in extra:
            found[name] = functools.partial(_replaced, extra["others_see"])
        elif "without_places" in extra:
            found[name] = without_places
        elif any(each is ErrorValue or _changes(each) for each in _structs(hint)):
            found[name] = _public
    return found


def _replaced(shown: Any, _: Any) -> Any:
    return shown


def _structs(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for part in typing.get_args(hint):
        yield from _structs(part)
