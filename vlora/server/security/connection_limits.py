"""Limits on the connections of a server. At the limit, unauthenticated connections are closed first."""

from __future__ import annotations

import resource
import socket
import threading

from vlora.client.sockets import shut_down

_SPARE = 128  # descriptors for the engine's socket, files and fetched images
_MAX_CONNECTIONS = 2048
_MIN_CONNECTIONS = 8


def connection_share() -> int:
    """The connections that RPyC or HTTP may keep: well below the process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(_MIN_CONNECTIONS, min(_MAX_CONNECTIONS, (soft - _SPARE) // 3))


class PeerSocket:
    """One connection: its socket, which a TLS handshake exchanges, and whether it is authenticated."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.authenticated = False
        self.ended = False

    def end(self) -> None:
        """Shut the connection down; its reader thread closes it."""
        self.ended = True  # for a reader that exchanges the socket now: the former one has no descriptor left
        shut_down(self.sock)


class ConnectionLimits:
    """The open connections, oldest first. Thread-safe."""

    def __init__(self, max_connections: int, max_unauthenticated: int) -> None:
        self._max_connections = max_connections
        self._max_unauthenticated = max_unauthenticated
        self._open: dict[PeerSocket, None] = {}
        self._lock = threading.Lock()

    def admit(self, peer: PeerSocket) -> bool:
        """Add a connection; at a limit, end the oldest unauthenticated one. False when all are authenticated."""
        with self._lock:
            unauthenticated = [other for other in self._open if not other.authenticated]
            if len(self._open) >= self._max_connections and not unauthenticated:
                return False
            if len(self._open) >= self._max_connections or len(unauthenticated) >= self._max_unauthenticated:
                unauthenticated[0].end()
                del self._open[unauthenticated[0]]
            self._open[peer] = None
            return True

    def remove(self, peer: PeerSocket) -> None:
        """Remove a closed connection. Connections that `admit` ended are ignored."""
        with self._lock:
            self._open.pop(peer, None)
