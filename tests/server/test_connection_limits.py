"""More connections than a server can keep: it continues to serve authenticated ones."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.api import running_api
from tests.server.running import running_server
from vlora.client import Client
from vlora.config import Token
from vlora.server.rpyc import server as rpyc_server
from vlora.server.security import connection_limits

TOKEN = "u" * 20


@contextlib.contextmanager
def silent(port: int, count: int) -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        yield sockets
    finally:
        for each in sockets:
            each.close()


def test_rpyc_survives_a_lack_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server() as server, Client(port=server.port) as old:
        real = socket.socket.accept
        failures = iter([OSError(24, "Too many open files")] * 2)

        def accept(self: socket.socket) -> Any:
            taken = real(self)
            if (failure := next(failures, None)) is not None:
                taken[0].close()
                raise failure
            return taken

        monkeypatch.setattr(socket.socket, "accept", accept)
        with silent(server.port, 3):  # the pending accept takes the first
            time.sleep(0.4)
        assert old.generate("say:old").text == "old"
        with Client(port=server.port) as new:
            assert new.generate("say:new").text == "new"


def test_rpyc_survives_a_lack_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start
    failed = threading.Event()

    def start(self: threading.Thread) -> None:
        if self.name == "vlora-rpyc-reader" and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        real(self)

    with running_server() as server, Client(port=server.port) as old:
        monkeypatch.setattr(threading.Thread, "start", start)
        with silent(server.port, 1) as (lost,):
            assert lost.recv(1) == b""
        assert failed.is_set() and old.generate("say:old").text == "old"
        with Client(port=server.port) as new:
            assert new.generate("say:new").text == "new"


def test_unauthenticated_connections_make_room_for_authenticated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpyc_server, "MAX_UNAUTHENTICATED", 5)
    with (
        running_server(tokens=(Token(name="u", secret=TOKEN),)) as server,
        Client(port=server.port, token=TOKEN) as old,
        silent(server.port, 20) as unauthenticated,
    ):
        for first in unauthenticated[:15]:
            assert first.recv(1) == b""
        with Client(port=server.port, token=TOKEN) as new:
            assert new.generate("say:new").text == "new" and old.generate("say:old").text == "old"


def test_authenticated_connections_are_not_closed_for_new_ones() -> None:
    def connection(authenticated: bool) -> connection_limits.PeerSocket:
        peer = connection_limits.PeerSocket(socket.socket())
        peer.authenticated = authenticated
        return peer

    limits = connection_limits.ConnectionLimits(2, 2)
    unauthenticated = connection(False)
    assert limits.admit(connection(True)) and limits.admit(unauthenticated) and limits.admit(connection(True))
    assert not limits.admit(connection(False))
    limits.remove(unauthenticated)
    assert not limits.admit(connection(False))


def test_surfaces_share_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, share in ((1024, 298), (resource.RLIM_INFINITY, 2048), (10, 8)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connection_limits.connection_share() == share


def test_a_server_is_not_ready_without_its_rpyc_listener() -> None:
    rpyc = SimpleNamespace(listening=True)
    with running_api(other_listener=rpyc) as api:
        assert api.call("GET", "/ready") == (200, {"status": "ready"})
        assert api.call("HEAD", "/ready") == (200, "") and api.call("HEAD", "/health") == (200, "")
        rpyc.listening = False
        assert api.call("GET", "/ready") == (503, {"status": "rpyc takes no connections"})
