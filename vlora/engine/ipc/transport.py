"""The local socket between a front end and its engine process, and both its ends: whole messages, in order.

A plain pair of sockets: a token's way is little more than the threads it wakes, and here it wakes one, the reader's.
Whichever end is closed, however its process ended, the other one knows at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator

_HEAD = struct.Struct("<Q")  # the bytes that follow
_END = bytearray()  # no message is empty


class Line(asyncio.Protocol):
    """The front end's, in its event loop. Made by `open`."""

    def __init__(self, hear: Callable[[bytes], object]) -> None:
        self.hear = hear
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once nothing more will be heard; fails with what `hear` raised."""
        self._part = bytearray()  # of a message
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, sock: socket.socket, hear: Callable[[bytes], object]) -> Line:
        """hear is called with each message, in the turn of the loop that finds it there, and may be set anew.

        The line owns the socket from now on.
        """
        sock.setblocking(False)
        _, line = await asyncio.get_running_loop().create_connection(lambda: cls(hear), sock=sock)
        return line

    def send(self, data: bytes) -> None:
        """Never waits: what the socket does not take is kept."""
        assert self._transport is not None
        self._transport.write(_HEAD.pack(len(data)) + data)

    def close(self) -> None:
        """What the other end has not taken is lost."""
        assert self._transport is not None
        self._transport.abort()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._part += data
        try:
            for message in self._whole():
                self.hear(message)
        except Exception as error:
            self.closed.set_exception(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def _whole(self) -> Iterator[bytes]:
        """The messages that are there, and no longer are."""
        start = 0
        while len(self._part) >= start + _HEAD.size:
            begin = start + _HEAD.size
            end = begin + _HEAD.unpack_from(self._part, start)[0]
            if len(self._part) < end:
                break
            start = end
            yield bytes(self._part[begin:end])
        del self._part[:start]


class EngineLine:
    """The engine's. A thread reads, so that pictures on their way hold up no step."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._arrived: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="vlora-engine-line", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Waits where the front end is so far behind that the system keeps no more for it; one that is gone hears
        nothing."""
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(_HEAD.pack(len(data)) + data)

    def receive(self, *, block: bool) -> bytearray | None:
        """The next message; None without one, and after `wake`. Raises EOFError once the front end is gone."""
        try:
            data = self._arrived.get(block)
        except queue.Empty:
            return None
        if data == _END:
            raise EOFError
        return data

    @property
    def arrived(self) -> bool:
        """Whether `receive` has something to give."""
        return not self._arrived.empty()

    def wake(self) -> None:
        """Let who waits in `receive` go on. For any thread."""
        self._arrived.put(None)

    def _read(self) -> None:
        # Who waits in recv is woken, too, when the other end has read what was sent here: after each token, and as
        # often on the core that computes the next one. Who waits in poll is not.
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        try:
            while True:
                waiting.poll()
                (size,) = _HEAD.unpack(self._exactly(_HEAD.size))
                self._arrived.put(self._exactly(size))
        except (OSError, EOFError):
            self._arrived.put(_END)

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:  # one call but for signals, such as one that stops the process for a while
            count = self._socket.recv_into(left, 0, socket.MSG_WAITALL)
            if count == 0:
                raise EOFError
            left = left[count:]
        return data
