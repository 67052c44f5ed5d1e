"""A peer that vanished without a word: its connection breaks within half a minute, not when TCP gives up by itself."""

from __future__ import annotations

import socket

_IDLE_S = 10
_PROBE_S = 5
_NUM_PROBES = 4
_UNACKNOWLEDGED_MS = 30_000


def notice_silence(sock: socket.socket) -> None:
    """Probe an idle connection, and give up bytes that nobody acknowledges, where the system has such options."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _PROBE_S),
        ("TCP_KEEPCNT", _NUM_PROBES),
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
