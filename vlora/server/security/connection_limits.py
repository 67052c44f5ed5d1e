"""Limits on the connections of a server. At the limit, unauthenticated connections are closed first."""

from __future__ import annotations

import resource
import socket
import threading

from vlora.client.tls import shut_down

_SPARE = 128  # descriptors for the engine's socket, files and fetched images
_MOST = 2048
_FEWEST = 8


def connection_share() -> int:
    """The connections that RPyC or HTTP may keep: well below the process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(_FEWEST, min(_MOST, (soft - _SPARE) // 3))


class Caller:
    """One connection: its socket, which a TLS handshake may exchange, and whether it is authenticated."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.known = False

    def end(self) -> None:
        """Shut the connection down; its reader thread closes it."""
        shut_down(self.sock)


class Callers:
    """The open connections, oldest first. Thread-safe."""

    def __init__(self, most: int, most_strangers: int) -> None:
        self._most = most
        self._most_strangers = most_strangers
        self._callers: dict[Caller, None] = {}
        self._lock = threading.Lock()

    def admit(self, caller: Caller) -> bool:
        """Add a connection; at the limit, end the oldest unauthenticated one. False when all are authenticated."""
        with self._lock:
            strangers = [other for other in self._callers if not other.known]
            if len(self._callers) >= self._most and not strangers:
                return False
            if len(self._callers) >= self._most or len(strangers) >= self._most_strangers:
                strangers[0].end()
                del self._callers[strangers[0]]
            self._callers[caller] = None
            return True

    def leave(self, caller: Caller) -> None:
        with self._lock:
            self._callers.pop(caller, None)
