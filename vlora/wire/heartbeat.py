"""How an end of a connection notices that the other end is gone while the connection stays open."""

from __future__ import annotations

import socket
from collections.abc import Callable


class Silence:
    """Counts beats without a byte from the other end.

    Beats are counted, not seconds: after a pause of this process itself, data that has arrived is read before the next
    beat. Bytes of an incomplete message count, so a long transfer is no silence.
    """

    def __init__(self, num_bytes_received: Callable[[], int]) -> None:
        self._count = num_bytes_received
        self._received = num_bytes_received()
        self._beats = 0

    def beat(self) -> int:
        """Call once in a beat. Returns the number of beats in a row without a byte."""
        before, self._received = self._received, self._count()
        self._beats = self._beats + 1 if self._received == before else 0
        return self._beats


def keep_alive(sock: socket.socket) -> None:
    """Let the system close an idle TCP connection to a machine that has vanished, within seconds.

    While sent bytes are unacknowledged it sends no probes, and closes the connection after about 15 minutes."""
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
