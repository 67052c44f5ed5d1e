"""Checks before the routes: access and body size, both before a body is held in memory."""

from __future__ import annotations

import contextlib
import functools
import math
import urllib.parse

from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlora.config import LOOPBACK_HOSTS, Token
from vlora.errors import BadRequest, Forbidden, OverCapacity, TooLarge, VLoraError
from vlora.server.console.routes import CONSOLE_FILES
from vlora.server.frontend import FrontEnd
from vlora.server.http.errors import error_response
from vlora.server.security.access import Access
from vlora.server.security.limits import ByteBudget
from vlora.server.security.public_errors import ANYONE

OPEN_PATHS = frozenset({"/health", "/ready"}) | CONSOLE_FILES.keys()
"""Paths without a token: health checks of load balancers, and the console page, where the user enters the token."""

ADAPTER_PATHS = "/v1/adapters"
FILE_PATHS = "/v1/files"  # whose bodies are no JSON, and go to disk
MAX_FIELDS = 20_000  # allowance for the structure of a body, in addition to commas in its text


def with_checks(app: ASGIApp, access: Access, front_end: FrontEnd) -> ASGIApp:
    """The application behind checks of the caller, then of the body's size. Its responses have headers of quotas."""
    check = functools.partial(_check_token, access) if access.required else _check_loopback
    config, budget, quotas = front_end.config, front_end.message_budget, front_end.quotas
    tracing = front_end.tracing
    most = config.max_message_bytes

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        try:
            check(scope)
        except VLoraError as error:
            front_end.metrics.count(error.code)
            await error_response(error)(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > most:
            await error_response(_too_large(most))(scope, receive, send)
            return
        uploads = FILE_PATHS if scope["method"] == "POST" else ADAPTER_PATHS + "/"
        most_commas = math.inf if scope["path"].startswith(uploads) else config.max_prompt_chars + MAX_FIELDS
        body = _BodyReader(receive, budget, most, most_commas)
        caller: Token | None = scope.get("state", {}).get("caller")

        async def with_quotas(message: Message) -> None:
            if message["type"] == "http.response.start" and caller is not None:
                message["headers"] = [*message["headers"], *quotas.headers(caller.name)]
            await send(message)

        try:
            with contextlib.nullcontext() if tracing is None else tracing.within(Headers(scope=scope)):
                await app(scope, body.receive, with_quotas)
        finally:
            budget.release(body.num_bytes)

    return checked


def _check_token(access: Access, scope: Scope) -> None:
    """Raises VLoraError for a caller without a token that permits the call."""
    caller: Token | None = ANYONE
    if scope["path"] not in OPEN_PATHS:
        scheme, secret = get_authorization_scheme_param(Headers(scope=scope).get("authorization"))
        token = secret if scheme.lower() == "bearer" else None
        caller = access.check(token, peer=(scope.get("client") or ("",))[0])
    scope.setdefault("state", {})["caller"] = caller


def _check_loopback(scope: Scope) -> None:
    """Check Host and Origin on a server without tokens, which only its loopback address protects.

    Requests from browser pages of other hosts are refused (DNS rebinding), and pages of this host allowed.

    Raises:
        VLoraError: The request is for another host, or from a page of one.
    """
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    if "@" in host or not _on_loopback(f"//{host}"):
        raise BadRequest(
            f"the request is for host {host[:100]!r}; without tokens this server accepts only "
            f"{', '.join(LOOPBACK_HOSTS)}: use one of these names, or start the server with --token-file"
        )
    if origin is not None and not _on_loopback(origin):
        raise Forbidden(f"requests from origin {origin[:100]!r} are refused: this server has no tokens")


def _on_loopback(origin: str) -> bool:
    try:
        return urllib.parse.urlsplit(origin).hostname in LOOPBACK_HOSTS
    except ValueError:
        return False


class _BodyReader:
    """The body of one request. num_bytes: reserved in the budget.

    max_commas: A JSON value takes one byte as text and tens of bytes in memory. Text and images have few commas. It is
    infinite for a body that is no JSON.
    """

    def __init__(self, receive: Receive, budget: ByteBudget, max_bytes: int, max_commas: float) -> None:
        self.num_bytes = 0
        self._receive = receive
        self._budget = budget
        self._max_bytes = max_bytes
        self._max_commas = max_commas
        self._num_commas = 0
        self._begun = max_commas == math.inf

    async def receive(self) -> Message:
        """Receive the next part, within the limits. Raises BadRequest, TooLarge or OverCapacity."""
        message = await self._receive()
        body: bytes = message.get("body", b"")
        if not self._begun and (start := body.lstrip()):
            self._begun = True
            if message.get("more_body") and not start.startswith(b"{"):
                # The JSON parser gives a better error for a short body.
                raise BadRequest("the body is not a JSON object; the rest of it was not read")
        if not self._budget.reserve(len(body)):
            raise OverCapacity(
                f"active requests use this server's {self._budget.limit} bytes for messages; try again later"
            )
        self.num_bytes += len(body)
        self._num_commas += body.count(b",")
        if self.num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        if self._num_commas > self._max_commas:
            raise TooLarge(f"the body has over {self._max_commas} commas, more than this server accepts")
        return message


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body exceeds this server's limit of {max_bytes} bytes")
