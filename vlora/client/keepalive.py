"""Detects peers that vanish: the connection breaks within half a minute, not at TCP's own timeout."""

from __future__ import annotations

import socket

_IDLE_S = 10
_PROBE_S = 5
_NUM_PROBES = 4
_UNACKNOWLEDGED_MS = 30_000


def enable_keepalive(sock: socket.socket) -> None:
    """Enable keepalive probes on an idle connection and a limit for unacknowledged bytes, where supported."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _PROBE_S),
        ("TCP_KEEPCNT", _NUM_PROBES),
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
