"""uvicorn's HTTP/1.1 protocol with time limits for a header, a body and a peer that does not read its response.

Invalid HTTP gets an error body in the API's own form.
"""

from __future__ import annotations

import asyncio
from typing import cast

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlora.errors import BadRequest
from vlora.server.http.errors import error_body
from vlora.server.joined_writes import JoinedWrites
from vlora.server.security.connection_limits import connection_share

_HEADER_S = 10.0
_BODY_S = 30.0
_LEAST_BYTES_PER_S = 64 * 1024  # a faster body may take longer
_SEND_S = 30.0  # a peer that reads nothing for this long is disconnected

_NO_HTTP = "the request is not valid HTTP/1.1, or its header is too long; the connection is closed"


class BoundedProtocol(H11Protocol):
    """One connection. At the connection limit, the connection idle longest is closed."""

    _reading: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None
    _in_body = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Join a header with its body, or with a stream's first event, in one write.
        super().connection_made(JoinedWrites(cast(asyncio.Transport, transport)))
        self._allow(_HEADER_S)
        # An aborted connection stays in this set until the loop processes it.
        here = [each for each in self.connections if isinstance(each, BoundedProtocol) and not each.leaving]
        if len(here) > connection_share():
            silent = (each for each in here if each.asks_nothing)
            min(silent, key=lambda each: each.last_asked, default=self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_clock()
        if self._sending is not None:
            self._sending.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        match self.conn.their_state:
            case h11.SEND_BODY:
                if not self._in_body:
                    self._in_body = True
                    self._allow(_BODY_S)
                elif self._reading is not None:
                    self._allow(self._reading.when() - self.loop.time() + len(data) / _LEAST_BYTES_PER_S)
            case h11.IDLE:
                if self._reading is None or self._in_body:
                    self._in_body = False
                    self._allow(_HEADER_S)
            case _:
                self._in_body = False
                self._stop_reading_clock()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error body."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error_body(BadRequest(_NO_HTTP)))
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
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Abort, because close would wait for data that the peer does not read.
        self._sending = self.loop.call_later(_SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        super().resume_writing()

    @property
    def leaving(self) -> bool:
        return self.transport.is_closing()

    @property
    def asks_nothing(self) -> bool:
        """Whether no request is in progress: the connection is new, idle, or has an incomplete header."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def last_asked(self) -> float:
        """Sort key: the time of the last activity."""
        return self._reading.when() if self._reading is not None else 0.0

    def _allow(self, seconds: float) -> None:
        self._stop_reading_clock()
        self._reading = self.loop.call_later(seconds, self.transport.abort)

    def _stop_reading_clock(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
