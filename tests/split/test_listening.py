"""Unix sockets of servers that start, stop and die at the same path."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from vlora.errors import BadConfig
from vlora.split import transport
from vlora.split.addresses import Address


def at(folder: Path) -> Address:
    return Address.parse(f"unix:{folder / 'base.sock'}")


def leave_stale(address: Address) -> None:
    """The socket of a process that was killed."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(address.path)


def listens(address: Address) -> bool:
    try:
        transport.open_connection(address, None, 1.0).close()
    except OSError:
        return False
    return True


def test_of_two_servers_that_find_a_stale_socket_one_listens(tmp_path: Path) -> None:
    address = at(tmp_path)
    for _ in range(100):
        leave_stale(address)
        both = threading.Barrier(2)
        listening: list[socket.socket] = []

        def start(both: threading.Barrier = both, listening: list[socket.socket] = listening) -> None:
            both.wait()
            try:
                listening.append(transport.listen(address))
            except BadConfig as error:
                assert "another process listens there" in str(error)

        threads = [threading.Thread(target=start) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(listening) == 1 and listens(address)
        transport.close_listener(listening[0])
        assert not os.path.exists(address.path)


def test_a_server_that_stops_leaves_its_successors_socket(tmp_path: Path) -> None:
    address = at(tmp_path)
    former = transport.listen(address)
    os.unlink(address.path)  # as by an operator
    successor = transport.listen(address)
    transport.close_listener(former)
    assert listens(address)
    transport.close_listener(successor)
    assert not os.path.exists(address.path)
    transport.close_listener(transport.listen(address))


def test_a_server_with_a_full_backlog_is_reported_at_once(tmp_path: Path) -> None:
    address = at(tmp_path)
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(address.path)
        busy.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address.path)
        began = time.monotonic()
        with pytest.raises(BadConfig, match="another process listens there"):
            transport.listen(address)
        assert time.monotonic() - began < 5
        for one in waiting:
            one.close()
    assert os.path.exists(address.path)


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    address = at(tmp_path)
    Path(address.path).write_text("mine")
    with pytest.raises(BadConfig, match="there is another file"):
        transport.listen(address)
    assert Path(address.path).read_text() == "mine"
