"""The engine's end of the local socket to its front end, whose end is a `MessageTransport` (`vlora.wire.framing`).

It is a plain socket pair: the latency of a token is little more than thread wake-ups, and here only the reader wakes
up. If either end is closed, for any reason, the other end sees it at once.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
from collections.abc import Callable

from vlora.wire.framing import HEAD, pack

_END = bytearray()  # no message is empty
_SHORT = 64  # bytes; longer than messages that are answered at once


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
            self._socket.sendall(pack(data))

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
                (size,) = HEAD.unpack(self._exactly(HEAD.size))
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
