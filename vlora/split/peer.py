"""A client's connection at the executor: reads one call at a time and writes its reply, without ever blocking."""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from vlora.errors import BadRequest
from vlora.split.frames import CALL_BYTES, CallHead

SMALL_BYTES = 16_384
"""Up to here, copying the parts of a message together costs less than sending them one by one."""
_MAX_DISCARDED = 64  # reads
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ReceivedCall(NamedTuple):
    """A complete call. body: its tensors, or None if they are in shared memory."""

    head: CallHead
    body: bytearray | None


class Peer:
    """An admitted client. Used by the executor's thread only.

    Attributes:
        slot: uint8 shared memory with two halves, for inputs and outputs; None if tensors travel on the connection.
        waits: Whether a call has been received and not been answered.
        is_permitted: Returns whether its token still is.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        slot: torch.Tensor | None,
        max_body: int,
        is_permitted: Callable[[], bool] = lambda: True,
    ) -> None:
        """max_body: maximum bytes of a call's tensors on the connection."""
        sock.setblocking(False)
        self.sock = sock
        self.name = name
        self.slot = slot
        self.waits = False
        self.is_permitted = is_permitted
        self._max_body = max_body
        self._head = bytearray(CALL_BYTES)
        self._body: bytearray | None = None
        self._received = 0
        self._unsent: deque[memoryview] = deque()
        self._last_moved = 0.0

    def read(self, now: float) -> ReceivedCall | None:
        """Read what has arrived; the call if it is complete.

        Raises:
            BadRequest: The call is too large, or the client sent more than one.
            OSError: The connection is closed or broken.
        """
        if self.waits:
            self._check_silence()
            return None
        while True:
            into = self._head if self._body is None else self._body
            if self._received < len(into):
                try:
                    count = self.sock.recv_into(memoryview(into)[self._received :])
                except _BLOCKED:
                    return None
                if not count:
                    raise ConnectionError("it closed the connection within a call" if self._received else "")
                self._received, self._last_moved = self._received + count, now
            elif self._body is None and (size := CallHead.unpack(self._head).num_bytes):
                if self.slot is not None or size > self._max_body:
                    raise BadRequest(f"a call has {size} bytes on the connection; the maximum is {self._max_body}")
                self._body, self._received = bytearray(size), 0
            else:
                call = ReceivedCall(CallHead.unpack(self._head), self._body)
                self._body, self._received, self.waits = None, 0, True
                return call

    def write(self, now: float, *parts: bytes | memoryview) -> None:
        """Send a reply, or as much of it as the connection takes. Raises OSError."""
        if sum(map(len, parts)) <= SMALL_BYTES:
            parts = (b"".join(parts),)  # one packet
        self._unsent.extend(memoryview(part) for part in parts)
        self.flush(now)

    def flush(self, now: float) -> None:
        """Send more of the reply. Raises OSError."""
        self._last_moved = now
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent[0])
            except _BLOCKED:
                return
            if sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent:]
            else:
                self._unsent.popleft()

    def discard(self) -> None:
        """Discard what has arrived: closing with unread data would also discard the last reply. Raises OSError."""
        for _ in range(_MAX_DISCARDED):
            try:
                if not self.sock.recv(65_536):
                    return
            except _BLOCKED:
                return

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def stalled_s(self, now: float) -> float:
        """Seconds since a part of an incomplete call or reply moved; 0 if there is none."""
        incomplete = self._unsent or (not self.waits and (self._received or self._body is not None))
        return now - self._last_moved if incomplete else 0.0

    def _check_silence(self) -> None:
        try:
            data = self.sock.recv(1)
        except _BLOCKED:
            return
        if data:
            raise BadRequest("it sent a second call before the first was answered")
        raise ConnectionError("it closed the connection during a call")
