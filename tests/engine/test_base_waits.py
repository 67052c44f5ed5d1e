"""Products wait, because requests leave no room: their clients' places, handshakes and tokens."""

from __future__ import annotations

import dataclasses
import datetime
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.processes import PATIENCE_S, until
from vlora.config import Token
from vlora.engine.base_service import EngineExecutor
from vlora.errors import Disconnected, Unauthorized, VLoraError
from vlora.orchestrator.latency_promise import LatencyPromise
from vlora.split import Base, connect, transport
from vlora.split.admission import Limits
from vlora.split.base_server import BaseServer
from vlora.split.batching import CallQueue
from vlora.split.frames import Direction
from vlora.wire.address import Address

OLD, NEW = (Token(name=name, secret=name * 16) for name in "on")


class Waiting:
    """A server with the test as its engine, which calls `executor.advance`.

    Attributes:
        errors: Of calls, by group.
        woken: Set when the engine is to look for work.
    """

    def __init__(self, folder: Path, *tokens: Token) -> None:
        layers = {"one": nn.Linear(8, 6), "two": nn.Linear(8, 7)}
        promise = LatencyPromise(1.15, time.monotonic, 4)
        self.address = f"unix:{folder}/base.sock"
        self.executor = EngineExecutor(layers, name="two", promise=promise, clock=time.monotonic)
        self.server = BaseServer(self.executor, CallQueue(), Limits(max_clients=2), tokens=tokens)
        self.executor.attend = self.server.attend
        self.woken = threading.Event()
        self.executor.wake = self.woken.set
        self.server.listen(transport.listen(Address.parse(self.address)))
        self.errors: dict[int, VLoraError | None] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._stop.is_set,))
        self._thread.start()

    def call(self, base: Base, group: int) -> threading.Thread:
        """A call in a thread of its own; its product waits when this returns, unless another one does."""

        def run() -> None:
            try:
                base.calls.call(Direction.FORWARD, group, 1, [torch.ones(4, 8)])
                self.errors[group] = None
            except VLoraError as error:
                self.errors[group] = error

        thread = threading.Thread(target=run)
        self.woken.clear()
        thread.start()
        assert self.woken.wait(PATIENCE_S)
        return thread

    def close(self) -> None:
        self.executor.close()
        self._stop.set()
        self.server.wake()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    found = Waiting(tmp_path)
    yield found
    found.close()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Waiting]:
    found = Waiting(tmp_path, OLD, NEW)
    yield found
    found.close()


def test_a_client_is_admitted_while_the_product_of_another_waits(waiting: Waiting) -> None:
    with connect(waiting.address) as first:
        call = waiting.call(first, 0)
        connect(waiting.address, patience_s=2.0).close()
        assert not waiting.errors, "the product did not wait"
        until(waiting.executor.advance)
        call.join(PATIENCE_S)
        assert waiting.errors == {0: None}


def test_a_product_that_nobody_waits_for_is_not_computed(waiting: Waiting) -> None:
    """It would keep the calls of others waiting, for ever if there is no room for it."""
    first = connect(waiting.address, patience_s=0.5)
    call = waiting.call(first, 0)
    waiting.woken.clear()
    call.join(PATIENCE_S)
    assert isinstance(waiting.errors[0], Disconnected)
    assert waiting.woken.wait(PATIENCE_S), "an engine that sleeps would not look"
    assert not waiting.executor.advance() and waiting.executor.num_rows == 0
    first.close()
    until(lambda: waiting.server.num_clients == 0)
    with connect(waiting.address) as second:
        call = waiting.call(second, 1)
        until(waiting.executor.advance)
        call.join(PATIENCE_S)
    assert waiting.errors[1] is None and waiting.executor.num_rows == 4


def test_a_removed_token_closes_its_connections(guarded: Waiting) -> None:
    """Those of others remain."""
    old, new = (connect(guarded.address, token=token.secret) for token in (OLD, NEW))
    with old, new:
        until(lambda: guarded.server.num_clients == 2)
        guarded.server.admission.tokens = (NEW,)
        until(lambda: guarded.server.num_clients == 1)
        with pytest.raises(Unauthorized):
            old.calls.call(Direction.FORWARD, 0, 1, [torch.ones(4, 8)])
        call = guarded.call(new, 1)
        until(guarded.executor.advance)
        call.join(PATIENCE_S)
    assert guarded.errors == {1: None}


def test_a_token_that_expires_closes_its_connections(guarded: Waiting) -> None:
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.3)
    guarded.server.admission.tokens = (dataclasses.replace(OLD, expires=soon),)
    with connect(guarded.address, token=OLD.secret):
        until(lambda: guarded.server.num_clients == 1)
        until(lambda: guarded.server.num_clients == 0)
