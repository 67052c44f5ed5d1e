"""uvicorn's HTTP/1.1 protocol with time limits for a header, a body and a peer that does not read its response.

Invalid HTTP gets an error body in the API's own form.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlora.errors import BadRequest
from vlora.server.http.errors import error_body
from vlora.server.security.connection_limits import connection_share

HEADER_S = 10.0
BODY_S = 30.0
LEAST_BYTES_PER_S = 64 * 1024  # a faster body may take longer
_MAX_JOINED_BYTES = 64 * 1024  # buffered writes; more is written immediately
SEND_S = 30.0  # a peer that reads nothing for this long is disconnected
_LINGER_S = 1.0  # how long input is discarded after an error response

_INVALID_HTTP = "the request is not valid HTTP/1.1, or its header is too long; the connection is closed"


class JoinedWrites(asyncio.Transport):
    """Joins all writes of one event loop iteration: each write costs a system call and wakes the reader."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
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

    def can_write_eof(self) -> bool:
        """Whether the transport can close its sending side alone."""
        return self._transport.can_write_eof()

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

    def is_closing(self) -> bool:
        """Whether the transport is closing."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """The transport's extra info."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Pause the transport's reads."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume the transport's reads."""
        self._transport.resume_reading()

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
        super().connection_made(JoinedWrites(cast(asyncio.Transport, transport)))
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
