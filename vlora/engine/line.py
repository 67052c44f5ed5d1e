"""The client's end of the socket to an engine process, in its event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import zmq


class Line:
    """Messages go out at once, and come in through `hear`, in the turn of the loop that finds them there.

    A plain socket whose descriptor the loop watches: `zmq.asyncio` makes a future of every message, which takes the
    loop another turn, and a token's way through the front end is little more than such turns.
    """

    def __init__(self, address: str, hear: Callable[[bytes], object]) -> None:
        """Bind to the address; hear is called with each message, and may be set anew. Belongs to the running loop."""
        self.hear = hear
        self._loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[None] = self._loop.create_future()
        """Fails with what `hear` raised; nothing is read any more."""
        self._unsent: deque[bytes] = deque()  # until the other end has connected
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)  # never drop and never block
        self._socket.linger = 0  # however this ends: a context that is collected waits for what lingers
        self._descriptor = self._socket.fileno()
        try:
            self._socket.bind(address)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._loop.add_reader(self._descriptor, self._turn)

    def send(self, data: bytes) -> None:
        """Never waits."""
        self._unsent.append(data)
        self._flush()
        if self._waits():
            self._loop.call_soon(self._turn)

    def close(self) -> None:
        """What was not taken by the other end is lost."""
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._context.destroy(linger=0)

    def _turn(self) -> None:
        """Send what waits and read what is there: ZeroMQ signals either through one descriptor."""
        try:
            while not self._socket.closed and not self.broken.done():
                self._flush()
                try:
                    data = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    if self._waits():
                        continue
                    return
                self.hear(data)
        except Exception as error:
            self.broken.set_exception(error)

    def _waits(self) -> bool:
        """Whether something can be read or sent now. The descriptor signals a change once, and sending, receiving
        and this very look may each take the signal that was meant for another."""
        if self._socket.closed:
            return False
        events = int(self._socket.get(zmq.EVENTS))
        return bool(events & zmq.POLLIN or (self._unsent and events & zmq.POLLOUT))

    def _flush(self) -> None:
        try:
            while self._unsent and not self._socket.closed:
                self._socket.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()
        except zmq.Again:
            pass  # nobody is connected; the descriptor will tell
