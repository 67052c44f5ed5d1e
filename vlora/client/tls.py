"""TLS under RPyC: one connection that a thread reads while others write."""

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

_CHUNK = 64 * 1024


def shut_down(sock: Any) -> None:
    """End a connection for both sides and wake who waits on it; whoever reads it closes it. Closed ones are left be."""
    if isinstance(sock, socket.socket):
        with contextlib.suppress(OSError):
            # The plain socket's own method: that of a TLS socket drops its state, and what another thread writes at
            # this moment would then leave unencrypted.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


class TlsStream(SocketStream):
    """A socket whose handshake is done. Used by both ends; raises EOFError once the connection is gone.

    OpenSSL's state is not to be touched by two threads at once, so every touch is short, under a lock, and never waits.
    What was decrypted waits in a buffer of ours: OpenSSL's own would keep it out of sight of `poll`.
    """

    __slots__ = ("_buffer", "_lock", "_write_s")

    def __init__(self, sock: ssl.SSLSocket, write_s: float) -> None:
        """write_s: a peer that takes nothing for so long is as good as gone."""
        super().__init__(sock)
        sock.setblocking(False)
        self._write_s = write_s
        self._lock = threading.Lock()
        self._buffer = bytearray()

    def poll(self, timeout: float | Timeout | None) -> bool:
        """Whether bytes can be read, waiting up to `timeout` seconds for some, without an end for None."""
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
                    raise EOFError(f"the peer took nothing for {self._write_s:g} s") from None
                continue
            except (OSError, ValueError) as error:  # the latter when another thread closes it at this moment
                self.close()
                raise EOFError(error) from error
            view = view[sent:]

    def close(self) -> None:
        shut_down(self.sock)
        with self._lock:
            super().close()

    def _receive(self) -> bool:
        """Move what has come into the buffer; False when nothing has."""
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
        """Wait for the socket; False when the deadline passes first."""
        if self.sock is ClosedFile:
            raise EOFError("the connection was closed")
        poller = select.poll()
        try:
            poller.register(self.sock, event)
        except ValueError as error:
            raise EOFError("the connection was closed") from error
        return bool(poller.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000))
