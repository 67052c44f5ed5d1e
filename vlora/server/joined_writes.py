"""Joins all writes of one event loop iteration: each write costs a system call and wakes the reader."""

from __future__ import annotations

import asyncio
from typing import Any

_MOST_BYTES = 64 * 1024  # buffered; more is written immediately


class JoinedWrites(asyncio.Transport):
    """Wraps a transport and joins its writes."""

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
        if self._num_bytes > _MOST_BYTES:
            self._write()

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
