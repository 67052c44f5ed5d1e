"""What stands before the routes: who may call, and how much may be sent. Both before a body is held in memory."""

from __future__ import annotations

from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlora.config import LOOPBACK_HOSTS
from vlora.errors import TooLarge, VLoraError
from vlora.server.access import Access
from vlora.server.http_errors import error_response
from vlora.server.metrics import Metrics

ADMIN_PATHS = "/v1/adapters"
OPEN_PATHS = frozenset({"/health", "/ready"})
"""What a load balancer asks; it has no token."""


def guarded(app: ASGIApp, access: Access, metrics: Metrics, max_bytes: int) -> ASGIApp:
    """The app behind its checks."""
    app = _BoundedBody(app, max_bytes)
    if access.required:
        return _TokenCheck(app, access, metrics)
    # Without tokens the address is the only guard: a web page may not reach it under a name of its own.
    return TrustedHostMiddleware(app, allowed_hosts=[*LOOPBACK_HOSTS, "[::1]"], www_redirect=False)


class _TokenCheck:
    def __init__(self, app: ASGIApp, access: Access, metrics: Metrics) -> None:
        self._app = app
        self._access = access
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, shown = get_authorization_scheme_param(Headers(scope=scope).get("authorization"))
            try:
                self._access.check(
                    shown if scheme.lower() == "bearer" else None, admin=scope["path"].startswith(ADMIN_PATHS)
                )
            except VLoraError as error:
                self._metrics.count(error.code)
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _BoundedBody:
    """Refuses bodies over a size before they are held in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = TooLarge(f"the body is over this server's limit of {self._max_bytes} bytes")
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await error_response(error)(scope, receive, send)
            return
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise error
            return message

        await self._app(scope, bounded, send)
