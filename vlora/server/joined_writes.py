"""What one turn of the event loop writes to a peer, as one write: each costs a system call, and wakes its reader."""

from __future__ import annotations

import asyncio
from typing import Any

_MOST_BYTES = 64 * 1024  # kept back; a turn that writes more does not wait for its end


class JoinedWrites(asyncio.Transport):
    """As the transport it is made of."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def write(self, data: Any) -> None:
        """See Transport."""
        if not self._parts:
            self._loop.call_soon(self._write)
        self._parts.append(bytes(data))
        self._num_bytes += len(data)
        if self._num_bytes > _MOST_BYTES:
            self._write()

    def close(self) -> None:
        """See Transport."""
        self._write()
        self._transport.close()

    def abort(self) -> None:
        """See Transport."""
        self._parts.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        """See Transport."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See Transport."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """See Transport."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """See Transport."""
        self._transport.resume_reading()

    def _write(self) -> None:
        parts, self._parts, self._num_bytes = self._parts, [], 0
        if parts:
            self._transport.write(b"".join(parts))
