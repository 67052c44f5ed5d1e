"""The stream under TLS, closed by one thread while another writes: nothing leaves unencrypted."""

from __future__ import annotations

import socket
import ssl
import threading
from typing import Any

import pytest

from vlora.client.tls import TlsStream, shut_down


def test_closing_ends_the_plain_socket_before_its_tls_state(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    wrapped = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    wrapped.check_hostname = False
    wrapped.verify_mode = ssl.CERT_NONE
    tls = wrapped.wrap_socket(ours, do_handshake_on_connect=False)
    stream = TlsStream(tls, 1.0)
    order: list[str] = []
    plain_shutdown, tls_shutdown = socket.socket.shutdown, ssl.SSLSocket.shutdown

    def write() -> None:
        with pytest.raises(EOFError):
            stream.write(b"secret")

    writing = threading.Thread(target=write)

    def plain(self: Any, how: int) -> None:
        kept = tls._sslobj is not None  # type: ignore[attr-defined]  # noqa: SLF001
        order.append(f"plain, state {'kept' if kept else 'gone'}")
        plain_shutdown(self, how)

    def secure(self: Any, how: int) -> None:
        writing.start()
        writing.join(0.1)
        order.append(f"tls, {'a writer waits' if writing.is_alive() else 'a writer went ahead'}")
        tls_shutdown(self, how)

    monkeypatch.setattr(socket.socket, "shutdown", plain)
    monkeypatch.setattr(ssl.SSLSocket, "shutdown", secure)
    stream.close()
    assert order[:2] == ["plain, state kept", "tls, a writer waits"]
    writing.join(5)
    assert not writing.is_alive()
    write()
    assert theirs.recv(100) == b""
    theirs.close()


def test_a_closed_socket_is_ignored() -> None:
    ours, theirs = socket.socketpair()
    reading = threading.Thread(target=ours.recv, args=(1,))
    reading.start()
    shut_down(ours)
    reading.join(5)
    assert not reading.is_alive()
    ours.close()
    theirs.close()
    shut_down(ours)
