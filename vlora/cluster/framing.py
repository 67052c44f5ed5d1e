"""Values between a front end and the processes that it starts: settings on stdin, and what they report on stdout.

A value is its length in four bytes, low byte first, and msgpack. Settings come over stdin, because other users can read
a command line, and the end of stdin is the end of the front end.
"""

from __future__ import annotations

import asyncio
from typing import IO, Any, TypeVar

import msgspec

T = TypeVar("T")


def pack(value: Any) -> bytes:
    data = msgspec.msgpack.encode(value)
    return len(data).to_bytes(4, "little") + data


def read(file: IO[bytes], kind: type[T]) -> T:
    """Read one value. Raises EOFError at the end of the file."""
    return msgspec.msgpack.decode(_exactly(file, int.from_bytes(_exactly(file, 4), "little")), type=kind)


async def receive(reader: asyncio.StreamReader, kind: Any) -> Any:
    """Read one value. Raises asyncio.IncompleteReadError at the end, and msgspec.MsgspecError for another value."""
    size = int.from_bytes(await reader.readexactly(4), "little")
    return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data
