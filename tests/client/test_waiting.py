"""Waiting for a server: until it answers, until the timeout, until `stop` is set."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.server.running import running_server
from vlora.client import Client, wait_for_server
from vlora.errors import BadRequest, Disconnected, EngineDead, VLoraError

NOBODY = 1  # a port that accepts no connection


class Coming:
    """A server that is ready after some errors."""

    def __init__(self, *errors: VLoraError) -> None:
        self.errors = list(errors)

    def stats(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


def wait(client: Any, wait_s: float, stop: threading.Event | None = None) -> list[str]:
    messages: list[str] = []
    wait_for_server(client, wait_s, stop, messages.append)
    return messages


def test_a_ready_server_causes_no_wait() -> None:
    with running_server() as server, Client(port=server.port) as client:
        assert wait(client, 0.0) == []


@pytest.mark.slow
def test_a_starting_server_is_awaited_and_reported_once() -> None:
    coming = Coming(Disconnected("no server"), EngineDead("its engine died"))
    assert wait(coming, 30.0) == ["no server; waiting for it"] and coming.errors == []


def test_a_missing_server_is_an_error_after_the_wait() -> None:
    began = time.monotonic()
    with Client(port=NOBODY) as client, pytest.raises(Disconnected, match="vlora serve"):
        wait(client, 0.3)
    assert time.monotonic() - began >= 0.3


def test_errors_that_waiting_cannot_fix_are_raised_at_once() -> None:
    with pytest.raises(BadRequest):
        wait(Coming(BadRequest("another protocol")), 3600.0)


def test_the_stop_event_ends_the_wait() -> None:
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(Disconnected):
        wait(Client(port=NOBODY), 3600.0, stop)
