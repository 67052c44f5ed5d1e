"""As little HTTP as a bench's client needs: with a whole library between, hundreds of clients in one process wait for
their own process more than for the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


class Connection:
    """One connection to a server on this machine, kept between requests; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    def send(self, path: str, body: dict[str, Any]) -> None:
        """Post JSON, and read nothing yet."""
        data = json.dumps(body).encode()
        head = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json")
        self._writer.write("\r\n".join((*head, f"Content-Length: {len(data)}", "", "")).encode() + data)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body of the answer. Raises OSError, EOFError or ValueError where none comes whole."""
        self.send(path, body)
        head = await self.reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if (length := _LENGTH.search(head)) is not None:
            return status, await self.reader.readexactly(int(length[1]))
        parts: list[bytes] = []
        while size := int(await self.reader.readline(), 16):
            parts.append((await self.reader.readexactly(size + 2))[:-2])
        await self.reader.readexactly(2)
        return status, b"".join(parts)

    def abort(self) -> None:
        """Cut it off, without a word."""
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(port: int, limit: int = 65_536) -> AsyncIterator[Connection]:
    """A connection, cut off at the end. limit: twice as many bytes are taken at most where nobody reads."""
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port, limit=limit))
    try:
        yield connection
    finally:
        connection.abort()
