"""The local socket between a front end and its engine process, and both its ends: whole messages, in order.

It is a plain socket pair: the latency of a token is little more than thread wake-ups, and here only the reader wakes
up. If either end is closed, for any reason, the other end sees it at once.
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
from typing import Any, cast

_HEAD = struct.Struct("<Q")  # number of bytes that follow
_END = bytearray()  # no message is empty
_SHORT = 64  # bytes; longer than messages that are answered at once


class UnreadableMessage(Exception):
    """The other end has sent something else than messages."""


class ClientTransport(asyncio.Protocol):
    """The front end's end, in its event loop. Created by `open`, or by a server of the loop for both ends of a line.

    Attributes:
        max_bytes: A longer message closes the transport; None accepts any.
        num_bytes_received: Those of an incomplete message are counted as they arrive.
        closed: Done when no more messages will arrive; fails with what `on_message` raised.
    """

    def __init__(self, on_message: Callable[[bytes], object], max_bytes: int | None = None) -> None:
        self.on_message = on_message
        self.max_bytes = max_bytes
        self.num_bytes_received = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._part = bytearray()  # of an incomplete message
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, sock: socket.socket, on_message: Callable[[bytes], object]) -> ClientTransport:
        """on_message: called with each message, in the iteration of the loop that receives it; may be replaced.

        The transport owns the socket from now on.
        """
        sock.setblocking(False)
        _, transport = await asyncio.get_running_loop().create_connection(lambda: cls(on_message), sock=sock)
        return transport

    def send(self, data: bytes) -> None:
        """Never blocks: data that the socket does not accept is buffered."""
        assert self._transport is not None
        self._transport.write(_HEAD.pack(len(data)) + data)

    def extra(self, name: str) -> Any:
        """Information about the connection, as asyncio's `get_extra_info`."""
        assert self._transport is not None
        return self._transport.get_extra_info(name)

    def close_after_sending(self) -> None:
        """Close the socket once the peer has accepted the buffered data."""
        assert self._transport is not None
        self._transport.close()

    def close(self) -> None:
        """Close the socket; data that the peer has not received is lost."""
        assert self._transport is not None
        self._transport.abort()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are of another class

    def data_received(self, data: bytes) -> None:
        self.num_bytes_received += len(data)
        self._part += data
        try:
            for message in self._complete_messages():
                self.on_message(message)
        except Exception as error:
            if not self.closed.done():
                self.closed.set_exception(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def _complete_messages(self) -> Iterator[bytes]:
        """Remove and return the complete messages in the buffer."""
        start = 0
        while len(self._part) >= start + _HEAD.size:
            begin = start + _HEAD.size
            size = _HEAD.unpack_from(self._part, start)[0]
            if self.max_bytes is not None and size > self.max_bytes:
                raise UnreadableMessage(f"a message of {size} bytes, over the limit of {self.max_bytes}")
            end = begin + size
            if len(self._part) < end:
                break
            start = end
            yield bytes(self._part[begin:end])
        del self._part[:start]


class EngineTransport:
    """The engine's end. A thread reads, so that large messages (images) do not delay a step."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._replies: dict[bytes, Callable[[], bytes]] = {}
        self._messages: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="vlora-engine-reader", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Blocks when the socket's buffer is full; data for a closed front end is dropped."""
        with contextlib.suppress(ConnectionError), self._sending:
            self._socket.sendall(_HEAD.pack(len(data)) + data)

    def reply_at_once(self, message: bytes, make_reply: Callable[[], bytes]) -> None:
        """Answer this message in the reading thread, even during a step, with what `make_reply` returns there."""
        self._replies[message] = make_reply

    def receive(self, *, block: bool, timeout_s: float | None = None) -> bytearray | None:
        """The next message; None if there is none, and after `wake`. Raises EOFError when the front end has closed.

        timeout_s: how long to block; None blocks until there is a message.
        """
        try:
            data = self._messages.get(block, timeout_s)
        except queue.Empty:
            return None
        if data == _END:
            raise EOFError
        return data

    @property
    def has_message(self) -> bool:
        """Whether `receive` would return a message."""
        return not self._messages.empty()

    def wake(self) -> None:
        """Wake up a blocked `receive`. May be called from any thread."""
        self._messages.put(None)

    def _read(self) -> None:
        # A thread blocked in recv also wakes up when the peer has read sent data: after each token, and often on the
        # core that computes the next one. A thread blocked in poll does not.
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        try:
            while True:
                waiting.poll()
                (size,) = _HEAD.unpack(self._exactly(_HEAD.size))
                message = self._exactly(size)
                # Most messages are long; their bytes are not copied to look them up.
                if size < _SHORT and (make_reply := self._replies.get(bytes(message))) is not None:
                    self.send(make_reply())
                else:
                    self._messages.put(message)
        except (OSError, EOFError):
            self._messages.put(_END)

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:  # one call, unless a signal interrupts it (for example one that suspends the process)
            count = self._socket.recv_into(left, 0, socket.MSG_WAITALL)
            if count == 0:
                raise EOFError
            left = left[count:]
        return data
