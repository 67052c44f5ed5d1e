"""uvicorn in the server's event loop."""

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
from vlora.server.http.protocol import BoundedProtocol
from vlora.server.security.connection_limits import connection_share
from vlora.wire.tls import server_context

# Longer than clients keep an idle connection (5 s is usual), so that no request arrives on a closed connection.
KEEP_ALIVE_S = 30
HANDSHAKE_S = 10.0
_ACCEPT_PAUSE_S = 0.1  # after the system refuses a connection; descriptors are freed when connections end


class HttpServer:
    """Binds its address when created and accepts connections when started. Raises BadConfig when it cannot listen."""

    def __init__(self, config: ServerConfig) -> None:
        assert config.http_port is not None
        self._config = config
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        # The protocol is given explicitly: asyncio sets TCP_NODELAY only when it sees TCP here. Without it, every
        # response of two packets (header, body) waits 40 ms for the client's acknowledgement.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((config.host, config.http_port))
        except OSError as error:
            self._socket.close()
            raise self._cannot_listen(error) from error
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        self._server: uvicorn.Server | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp) -> None:
        """Raises BadConfig when another server has taken the address since."""
        try:
            self._socket.listen()  # from here on connections queue instead of being refused
        except OSError as error:
            raise self._cannot_listen(error) from error
        settings = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            log_config=None,  # `vlora.logging_format` configures logging
            log_level="error",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=KEEP_ALIVE_S,
            server_header=False,
        )
        tls = server_context(self._config)
        self._server = _Uvicorn(settings) if tls is None else _TlsUvicorn(settings, self._socket, tls)
        self._running = asyncio.create_task(self._server.serve([self._socket] if tls is None else []))

    def _cannot_listen(self, error: OSError) -> BadConfig:
        where = f"{self._config.host}:{self._config.http_port}"
        return BadConfig(f"cannot listen on {where}: {error.strerror}; choose another --http-port")

    async def close(self) -> None:
        if self._server is not None and self._running is not None:
            self._server.should_exit = True
            await asyncio.wait({self._running})
        self._socket.close()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handling to `vlora.server.launch`."""
        yield


class _TlsUvicorn(_Uvicorn):
    """Performs TLS handshakes itself, to limit their number: uvicorn does not count them as connections."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, tls: ssl.SSLContext) -> None:
        super().__init__(config)
        self._listener = listener
        self._tls = tls
        self._handshakes: dict[asyncio.Task[None], None] = {}  # oldest first

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        for task in self._handshakes:
            task.cancel()
        await asyncio.wait({self._accepting, *self._handshakes})
        await super().shutdown(sockets)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if self._handshakes and len(self._handshakes) + len(self.server_state.connections) >= connection_share():
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._shake_hands(sock))
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))
            await asyncio.sleep(0)  # now the handshake has begun and closes the socket on cancellation

    async def _shake_hands(self, sock: socket.socket) -> None:
        # A peer that does not finish, or rejects the certificate, is dropped without a log line.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, sock, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S
            )

    def _make_protocol(self) -> asyncio.Protocol:
        return BoundedProtocol(self.config, self.server_state, self.lifespan.state)
