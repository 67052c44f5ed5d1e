"""The plain stream sends complete messages for any size of partial writes, without copying the remainder each time."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest

from vlora.client.plain import PlainStream


class _Sparing:
    """A socket that accepts a thousand bytes at a time, and records them."""

    def __init__(self) -> None:
        self.taken = b""
        self.owners: set[int] = set()

    def send(self, data: Any) -> int:
        self.owners.add(id(memoryview(data).obj))
        self.taken += bytes(data[:1000])
        return min(len(data), 1000)


def test_a_large_message_is_sent_whole_without_copies() -> None:
    data, sock = os.urandom(300_500), _Sparing()
    PlainStream(sock).write(data)
    assert sock.taken == data
    assert sock.owners == {id(data)}, "every piece is a view of the message itself"


def test_data_written_to_a_real_socket_is_read_unchanged() -> None:
    ours, theirs = socket.socketpair()
    data = os.urandom(3_000_000)
    writing = threading.Thread(target=PlainStream(ours).write, args=(data,))
    writing.start()
    assert PlainStream(theirs).read(len(data)) == data
    writing.join(5)
    ours.close()
    theirs.close()


def test_a_silent_or_closed_peer_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    stream = PlainStream(ours)
    with pytest.raises(EOFError):
        stream.write(b"x" * 10_000_000)
    assert stream.closed
    theirs.close()
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(EOFError):
        PlainStream(ours).write(b"x")
