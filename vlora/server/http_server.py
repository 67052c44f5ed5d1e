"""uvicorn in the server's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from vlora.config import ServerConfig
from vlora.errors import BadConfig
from vlora.server.http_protocol import BoundedProtocol

# Longer than clients keep an idle connection (5 s is usual): who closes first must not be the one that is written to.
_KEEP_ALIVE_S = 30


class HttpServer:
    """Takes its address when it is made, callers when it is started. Raises BadConfig when it cannot listen."""

    def __init__(self, config: ServerConfig) -> None:
        assert config.http_port is not None
        self._config = config
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        # With its protocol named: asyncio sends small packets at once (TCP_NODELAY) only where it reads TCP here. Else
        # every answer of two packets, header and body, waits 40 ms for the caller's acknowledgement.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((config.host, config.http_port))
        except OSError as error:
            self._socket.close()
            where = f"{config.host}:{config.http_port}"
            raise BadConfig(f"cannot listen on {where}: {error.strerror}; choose another --http-port") from error
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        self._server: uvicorn.Server | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp) -> None:
        self._socket.listen()  # from here on callers wait instead of being refused
        settings = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            log_level="error",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=_KEEP_ALIVE_S,
            server_header=False,
            ssl_certfile=self._config.tls_cert,
            ssl_keyfile=self._config.tls_key,
            ssl_ca_certs=self._config.tls_client_ca,
            ssl_cert_reqs=ssl.CERT_NONE if self._config.tls_client_ca is None else ssl.CERT_REQUIRED,
        )
        self._server = _Uvicorn(settings)
        self._running = asyncio.create_task(self._server.serve([self._socket]))

    async def close(self) -> None:
        if self._server is not None and self._running is not None:
            self._server.should_exit = True
            await asyncio.wait({self._running})
        self._socket.close()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The supervisor has the signals."""
        yield
