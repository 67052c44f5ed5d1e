"""A minimal HTTP client for benches: with a full library, hundreds of clients in one process would wait mainly for
their own process. Parsing is done by h11, as in the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Any

import h11

_READ_BYTES = 65_536  # bytes


class HttpProtocol:
    """The protocol state of one persistent connection, without I/O: posts JSON, one request after another.

    Args:
        headers: Sent with each request, including Host; this machine's name by default.
    """

    status = 0
    body = b""
    """The body of the current answer received so far."""

    def __init__(self, headers: Mapping[str, str] = MappingProxyType({"Host": "127.0.0.1"})) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._headers = tuple(headers.items())

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The bytes of a request."""
        if self._http.our_state is h11.MUST_CLOSE:
            raise EOFError("the server's last answer was the connection's last")
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        self.status, self.body = 0, b""
        data = json.dumps(body).encode()
        headers = [*self._headers, ("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
        request = h11.Request(method="POST", target=path, headers=headers)
        return b"".join(self._http.send(each) or b"" for each in (request, h11.Data(data), h11.EndOfMessage()))

    def receive(self, data: bytes) -> bool:
        """Whether the answer is complete after these bytes."""
        if not data:
            raise EOFError(f"the server ended in the middle of {self.body!r}")
        self._http.receive_data(data)
        parts = [self.body]
        try:
            while (event := self._http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    self.status = event.status_code
                elif isinstance(event, h11.Data):
                    parts.append(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    return True
        except h11.RemoteProtocolError as error:
            raise ValueError(f"no HTTP: {error}") from error
        finally:
            self.body = b"".join(parts)
        return False


class HttpConnection:
    """One persistent connection; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: HttpProtocol) -> None:
        self.reader, self.protocol = reader, protocol
        self._writer = writer

    def send(self, path: str, body: dict[str, Any]) -> None:
        """Post JSON without reading the response."""
        self._writer.write(self.protocol.post(path, body))

    async def receive(self, on_part: Callable[[], None] = lambda: None) -> tuple[int, bytes]:
        """Status and body of the answer. on_part: called after each part of it."""
        complete = False
        while not complete:
            complete = self.protocol.receive(await self.reader.read(_READ_BYTES))
            on_part()
        return self.protocol.status, self.protocol.body

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body of the answer."""
        self.send(path, body)
        return await self.receive()

    def abort(self) -> None:
        """Abort the connection immediately."""
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(port: int, limit: int = _READ_BYTES) -> AsyncIterator[HttpConnection]:
    """A connection to a server on this machine, aborted at the end."""
    connection = HttpConnection(*await asyncio.open_connection("127.0.0.1", port, limit=limit), HttpProtocol())
    try:
        yield connection
    finally:
        connection.abort()
