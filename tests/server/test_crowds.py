"""More connections than a server can keep: it continues to serve authenticated ones."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.api import running_api
from tests.server.running import running_server
from vlora.client import Client
from vlora.config import Token
from vlora.server.rpyc import protocol
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


def test_rpyc_lives_through_a_want_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_rpyc_lives_through_a_want_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_strangers_make_room_for_those_who_show_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_MAX_STRANGERS", 5)
    with (
        running_server(tokens=(Token(name="u", secret=TOKEN),)) as server,
        Client(port=server.port, token=TOKEN) as old,
        silent(server.port, 20) as strangers,
    ):
        for first in strangers[:15]:
            assert first.recv(1) == b""
        with Client(port=server.port, token=TOKEN) as new:
            assert new.generate("say:new").text == "new" and old.generate("say:old").text == "old"


def test_known_callers_are_not_sent_away_for_new_ones() -> None:
    def caller(known: bool) -> connection_limits.Caller:
        made = connection_limits.Caller(socket.socket())
        made.known = known
        return made

    crowd = connection_limits.Callers(2, 2)
    stranger = caller(False)
    assert crowd.admit(caller(True)) and crowd.admit(stranger) and crowd.admit(caller(True))
    assert not crowd.admit(caller(False))
    crowd.leave(stranger)
    assert not crowd.admit(caller(False))


def test_surfaces_share_what_the_process_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, share in ((1024, 298), (resource.RLIM_INFINITY, 2048), (10, 8)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connection_limits.connection_share() == share


def test_a_server_whose_rpyc_is_gone_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    listens = [True]
    with running_api(others_listen=lambda: listens[0]) as api:
        assert api.call("GET", "/ready") == (200, {"status": "ready"})
        assert api.call("HEAD", "/ready") == (200, "") and api.call("HEAD", "/health") == (200, "")
        listens[0] = False
        assert api.call("GET", "/ready") == (503, {"status": "rpyc takes no connections"})
