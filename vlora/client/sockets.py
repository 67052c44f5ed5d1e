"""Sockets under RPyC, plain and with TLS: one connection with one reader thread and several writers."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from typing import Any

from rpyc.core.stream import ClosedFile, SocketStream
from rpyc.lib import Timeout

from vlora.errors import BadConfig

_CHUNK = 64 * 1024
_IDLE_S = 10
_PROBE_S = 5
_NUM_PROBES = 4
_UNACKNOWLEDGED_MS = 30_000


def shut_down(sock: Any) -> None:
    """Shut down a connection in both directions and wake the threads that wait on it; its reader closes it. Closed
    sockets are ignored.
    """
    if isinstance(sock, socket.socket):
        with contextlib.suppress(OSError):
            # The plain socket's own method: the method of a TLS socket drops its state, and a concurrent write of
            # another thread would then be sent unencrypted.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


def client_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """The context that verifies a server by `ca` and presents `cert`; None without files. Raises BadConfig."""
    if ca is None:
        if cert is not None:
            raise BadConfig("--tls-cert requires TLS; also give --tls-ca")
        return None
    try:
        tls = ssl.create_default_context(cafile=ca)
        if cert is not None:
            tls.load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as error:
        given = ", ".join(repr(file) for file in (ca, cert, key) if file is not None)
        raise BadConfig(f"the files of --tls-ca, --tls-cert and --tls-key cannot be used ({given}): {error}") from error
    return tls


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


class PlainStream(SocketStream):
    """The stream of a plain connection, used by both ends. Raises EOFError once the connection is closed, and if the
    peer reads nothing for the duration of the socket's timeout.
    """

    __slots__ = ()

    def write(self, data: bytes) -> None:
        """Writes without copying: RPyC's own method copies the remainder for each chunk, so that a raw 8K frame took
        half a minute.
        """
        view = memoryview(data)
        try:
            while view:
                view = view[self.sock.send(view) :]
        except OSError as error:
            self.close()
            raise EOFError(error) from error


class TlsStream(SocketStream):
    """The stream of a socket after its handshake, used by both ends; raises EOFError once the connection is closed.

    OpenSSL's state must not be used by two threads at once, so every use is short, under a lock, and never waits.
    Decrypted bytes are buffered here: in OpenSSL's own buffer they would be invisible to `poll`.
    """

    __slots__ = ("_buffer", "_lock", "_write_s")

    def __init__(self, sock: ssl.SSLSocket, write_s: float) -> None:
        """write_s: a peer that reads nothing for this long counts as disconnected."""
        super().__init__(sock)
        sock.setblocking(False)
        self._write_s = write_s
        self._lock = threading.Lock()
        self._buffer = bytearray()

    def poll(self, timeout: float | Timeout | None) -> bool:
        """Whether bytes can be read, waiting up to `timeout` seconds for them; without limit for None."""
        left: float | None = Timeout(timeout).timeleft()
        deadline = None if left is None else time.monotonic() + left
        while not self._buffer:
            if not self._receive() and not self._wait(select.POLLIN, deadline):
                return False
        return True

    def read(self, count: int) -> bytes:
        while len(self._buffer) < count:
            if not self._receive():
                self._wait(select.POLLIN, None)
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                with self._lock:
                    sent = self.sock.send(view[:_CHUNK])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                if not self._wait(select.POLLOUT, time.monotonic() + self._write_s):
                    self.close()
                    raise EOFError(f"the peer read nothing for {self._write_s:g} s") from None
                continue
            except (OSError, ValueError) as error:  # ValueError: another thread closed the socket meanwhile
                self.close()
                raise EOFError(error) from error
            view = view[sent:]

    def close(self) -> None:
        shut_down(self.sock)
        with self._lock:
            super().close()

    def _receive(self) -> bool:
        """Move received bytes into the buffer; False if there are none."""
        try:
            with self._lock:
                data = self.sock.recv(_CHUNK)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except (OSError, ValueError) as error:  # as above
            self.close()
            raise EOFError(error) from error
        if not data:
            self.close()
            raise EOFError("connection closed by peer")
        self._buffer += data
        return True

    def _wait(self, event: int, deadline: float | None) -> bool:
        """Wait for the socket; False if the deadline passes first."""
        if self.sock is ClosedFile:
            raise EOFError("the connection was closed")
        poller = select.poll()
        try:
            poller.register(self.sock, event)
        except ValueError as error:
            raise EOFError("the connection was closed") from error
        return bool(poller.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000))
