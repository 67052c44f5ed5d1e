"""Checks before the routes: access and body size, both before a body is held in memory."""

from __future__ import annotations

import math
import urllib.parse

from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlora.config import LOOPBACK_HOSTS, ServerConfig
from vlora.errors import BadRequest, Forbidden, OverCapacity, TooLarge, VLoraError
from vlora.server.console.files import CONSOLE_FILES
from vlora.server.http.errors import error_response
from vlora.server.metrics import Metrics
from vlora.server.security.access import Access
from vlora.server.security.limits import ByteBudget
from vlora.server.security.public_errors import ANYONE

ADAPTER_PATHS, TRAINING_PATHS, CLUSTER_PATHS = "/v1/adapters", "/v1/trainings", "/v1/cluster"
LEARNING_PATHS = "/v1/learning"
LORA_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # as of vLLM
ADMIN_PATHS = (ADAPTER_PATHS, TRAINING_PATHS, CLUSTER_PATHS, LEARNING_PATHS, *LORA_PATHS)
"""Methods other than GET need an admin token."""
OPEN_PATHS = frozenset({"/health", "/ready"}) | CONSOLE_FILES.keys()
"""Paths without a token: health checks of load balancers, and the console page, where the user enters the token."""

FILE_PATHS = "/v1/files"  # whose bodies are no JSON, and go to disk
MAX_FIELDS = 20_000  # allowance for the structure of a body, in addition to commas in its text


def with_checks(app: ASGIApp, access: Access, metrics: Metrics, budget: ByteBudget, config: ServerConfig) -> ASGIApp:
    app = _BoundedBody(app, budget, config.max_message_bytes, config.max_prompt_chars + MAX_FIELDS)
    if access.required:
        return _TokenCheck(app, access, metrics)
    return _LoopbackCheck(app, metrics)


class _TokenCheck:
    def __init__(self, app: ASGIApp, access: Access, metrics: Metrics) -> None:
        self._app = app
        self._access = access
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            scope.setdefault("state", {})["caller"] = ANYONE
        elif scope["type"] == "http":
            scheme, secret = get_authorization_scheme_param(Headers(scope=scope).get("authorization"))
            try:
                changes = scope["path"].startswith(ADMIN_PATHS) and scope["method"] not in ("GET", "HEAD")
                token = secret if scheme.lower() == "bearer" else None
                peer = (scope.get("client") or ("",))[0]
                caller = self._access.check(token, admin=changes, peer=peer)
                scope.setdefault("state", {})["caller"] = caller
            except VLoraError as error:
                self._metrics.count(error.code)
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _LoopbackCheck:
    """Checks Host and Origin on a server without tokens, which only its loopback address protects.

    Refuses requests from browser pages of other hosts (DNS rebinding); allows pages of this host.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, origin = headers.get("host", ""), headers.get("origin")
            error: VLoraError | None = None
            if "@" in host or not _on_loopback(f"//{host}"):
                error = BadRequest(
                    f"the request is for host {host[:100]!r}; without tokens this server accepts only "
                    f"{', '.join(LOOPBACK_HOSTS)}: use one of these names, or start the server with --token-file"
                )
            elif origin is not None and not _on_loopback(origin):
                error = Forbidden(f"requests from origin {origin[:100]!r} are refused: this server has no tokens")
            if error is not None:
                self._metrics.count(error.code)
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _on_loopback(origin: str) -> bool:
    try:
        return urllib.parse.urlsplit(origin).hostname in LOOPBACK_HOSTS
    except ValueError:
        return False


class _BoundedBody:
    """Refuses bodies that are too large, and bodies that would take too much memory once they are parsed.

    max_commas: A JSON value takes one byte as text and tens of bytes in memory. Text and images have few commas.
    """

    def __init__(self, app: ASGIApp, budget: ByteBudget, max_bytes: int, max_commas: int) -> None:
        self._app = app
        self._budget = budget
        self._max_bytes = max_bytes
        self._max_commas = max_commas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await error_response(_too_large(self._max_bytes))(scope, receive, send)
            return
        most_commas = math.inf if scope["path"] == FILE_PATHS else self._max_commas
        body = _BodyReader(receive, self._budget, self._max_bytes, most_commas)
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._budget.release(body.num_bytes)


class _BodyReader:
    """The body of one request. num_bytes: reserved in the budget. max_commas: infinite for a body that is no JSON."""

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
