"""uvicorn in the server's event loop, with time limits for a header, a body and a peer that reads no response.

Invalid HTTP gets an error body in the API's own form.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any, cast

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlora.config import ServerConfig
from vlora.errors import BadRequest
from vlora.server.http.errors import error_body
from vlora.server.security.limits import bound_socket, connection_share, listening_at
from vlora.wire.tls import server_context

# Longer than clients keep an idle connection (5 s is usual), so that no request arrives on a closed connection.
KEEP_ALIVE_S = 30
HANDSHAKE_S = 10.0
_ACCEPT_PAUSE_S = 0.1  # after the system refuses a connection; descriptors are freed when connections end
HEADER_S = 10.0
BODY_S = 30.0
LEAST_BYTES_PER_S = 64 * 1024  # a faster body may take longer
_MAX_JOINED_BYTES = 64 * 1024  # buffered writes; more is written immediately
SEND_S = 30.0  # a peer that reads nothing for this long is disconnected
_LINGER_S = 1.0  # how long input is discarded after an error response

_INVALID_HTTP = "the request is not valid HTTP/1.1, or its header is too long; the connection is closed"


class HttpServer:
    """Binds its address when created and accepts connections when started. Raises BadConfig when it cannot listen."""

    def __init__(self, config: ServerConfig) -> None:
        assert config.http_port is not None
        self._config = config
        self._socket = bound_socket(config.host, config.http_port, "--http-port")
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        self._server: uvicorn.Server | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp) -> None:
        """Raises BadConfig when another server has taken the address since."""
        with listening_at(f"{self._config.host}:{self._config.http_port}", "--http-port"):
            self._socket.listen()  # from here on connections queue instead of being refused
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


class JoinedWrites:
    """A transport that joins all writes of one event loop iteration: each costs a system call and wakes the reader."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def write(self, data: Any) -> None:
        """Buffer data until the end of the loop iteration."""
        if not self._parts:
            self._loop.call_soon(self._write)
        self._parts.append(bytes(data))
        self._num_bytes += len(data)
        if self._num_bytes > _MAX_JOINED_BYTES:
            self._write()

    def write_eof(self) -> None:
        """Flush, then close the transport's sending side."""
        self._write()
        self._transport.write_eof()

    def close(self) -> None:
        """Flush, then close the transport."""
        self._write()
        self._transport.close()

    def abort(self) -> None:
        """Discard buffered data and abort the transport."""
        self._parts.clear()
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _write(self) -> None:
        parts, self._parts, self._num_bytes = self._parts, [], 0
        if parts:
            self._transport.write(b"".join(parts))


class BoundedProtocol(H11Protocol):
    """One connection. At the connection limit, the connection idle longest is closed."""

    _read_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _in_body = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Join a header with its body, or with a stream's first event, in one write.
        super().connection_made(cast(asyncio.Transport, JoinedWrites(cast(asyncio.Transport, transport))))
        self._set_read_timeout(HEADER_S)
        # An aborted connection stays in this set until the loop processes it.
        here = [each for each in self.connections if isinstance(each, BoundedProtocol) and not each.closing]
        if len(here) > connection_share():
            idle = (each for each in here if each.idle)
            min(idle, key=lambda each: each.last_active_at, default=self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_read_timeout()
        for timer in (self._send_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None:
            return  # after an error response
        super().data_received(data)
        match self.conn.their_state:
            case h11.SEND_BODY:
                if not self._in_body:
                    self._in_body = True
                    self._set_read_timeout(BODY_S)
                elif self._read_timer is not None:
                    self._set_read_timeout(self._read_timer.when() - self.loop.time() + len(data) / LEAST_BYTES_PER_S)
            case h11.IDLE:
                if self._read_timer is None or self._in_body:
                    self._in_body = False
                    self._set_read_timeout(HEADER_S)
            case _:
                self._in_body = False
                self._cancel_read_timeout()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error body."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error_body(BadRequest(_INVALID_HTTP)))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        # Otherwise a response has begun or ended already, and the rest of its request is invalid.
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        # Closing a socket with unread input resets the connection, and the peer may lose the response.
        self.transport.write_eof()
        self._cancel_read_timeout()
        self._linger_timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        # Abort, because close would wait for data that the peer does not read.
        self._send_timer = self.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
        super().resume_writing()

    @property
    def closing(self) -> bool:
        return self.transport.is_closing()

    @property
    def idle(self) -> bool:
        """Whether no request is in progress: the connection is new, idle, or has an incomplete header."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def last_active_at(self) -> float:
        """Sort key: the time of the last activity."""
        return self._read_timer.when() if self._read_timer is not None else 0.0

    def _set_read_timeout(self, seconds: float) -> None:
        self._cancel_read_timeout()
        self._read_timer = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_read_timeout(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
