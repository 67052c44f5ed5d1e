"""Errors for callers without an admin token: adapter and cause, without paths and addresses of the server."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from vlora.client.values import FrameResult, FrameResults, HeadOutcome
from vlora.config import Token
from vlora.errors import AdapterChanged, BadAdapter, EngineDead, StepFailed, VLoraError
from vlora.server.security.access import is_admin
from vlora.types import AdapterStatus, ErrorValue

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


def statuses_for(statuses: Iterable[AdapterStatus], caller: Token | None) -> tuple[AdapterStatus, ...]:
    """The statuses that a caller may see."""
    if is_admin(caller):
        return tuple(statuses)
    return tuple(
        status if status.error is None else msgspec.structs.replace(status, error=without_places(status.error))
        for status in statuses
    )


def outcomes_for(outcomes: Iterable[HeadOutcome], caller: Token | None) -> tuple[HeadOutcome, ...]:
    """The results of several heads that a caller may see."""
    if is_admin(caller):
        return tuple(outcomes)
    return tuple(
        each if each.error is None else msgspec.structs.replace(each, error=value_for(each.error, caller))
        for each in outcomes
    )


def results_for(found: FrameResults, caller: Token | None) -> FrameResults:
    """The results of frames that a caller may see."""
    if is_admin(caller):
        return found
    return msgspec.structs.replace(found, results=tuple(_result_for(each, caller) for each in found.results))


def _result_for(result: FrameResult, caller: Token | None) -> FrameResult:
    answers = tuple(
        each if each.error is None else msgspec.structs.replace(each, error=value_for(each.error, caller))
        for each in result.answers
    )
    error = None if result.error is None else value_for(result.error, caller)
    return msgspec.structs.replace(result, answers=answers, error=error)
