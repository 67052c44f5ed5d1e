"""The caller of a request, as the checks before the routes have found it."""

from __future__ import annotations

from starlette.requests import HTTPConnection

from vlora.config import Token


def caller_of(request: HTTPConnection) -> Token | None:
    """The caller's token; None where the server has no tokens."""
    caller: Token | None = getattr(request.state, "caller", None)
    return caller


def tenant(request: HTTPConnection) -> str | None:
    """The name of the caller's token; None where the server has no tokens."""
    caller = caller_of(request)
    return None if caller is None else caller.name
