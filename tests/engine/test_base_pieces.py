"""Products for clients of the base keep the latency promise, and take turns with trainings; the clock is the test's.

While products wait, because requests leave no room, clients are admitted, leave, and lose their tokens.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.processes import PATIENCE_S, until
from vlora.config import Token
from vlora.engine.base_service import EngineExecutor
from vlora.engine.build import WorkByTurns
from vlora.errors import Disconnected, Unauthorized, VLoraError
from vlora.orchestrator.latency_promise import QUIET_S, LatencyPromise
from vlora.split import Base, connect, transport
from vlora.split.admission import Limits
from vlora.split.base_server import BaseServer, Stopped
from vlora.split.batching import FIXED_ROWS, CallQueue
from vlora.split.executor import BaseExecutor
from vlora.split.frames import Direction
from vlora.wire.address import Address

ROW_S, STEP_S, SLOWDOWN = 5e-4, 0.1, 1.5
ROWS = 256


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Case:
    """An executor of one layer, in which a row takes `ROW_S` and the weights as long as `FIXED_ROWS` rows.

    Attributes:
        rows: Of each piece so far.
        left: Rows of the present call that were not computed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.promise = LatencyPromise(SLOWDOWN, self.clock, 4)
        self.layer = nn.Linear(8, 6)
        self.executor = EngineExecutor({"layer": self.layer}, name="one", promise=self.promise, clock=self.clock)
        self.rows: list[int] = []
        self.left = 0
        inner = BaseExecutor.compute

        def compute(executor: Any, direction: int, group: int, mask: int, inputs: Any, out: Any) -> Any:
            self.rows.append(len(inputs[0]))
            self.left -= len(inputs[0])
            self.clock.now += ROW_S * (len(inputs[0]) + FIXED_ROWS)
            return inner(executor, direction, group, mask, inputs, out)

        monkeypatch.setattr(BaseExecutor, "compute", compute)

    def call(self, x: torch.Tensor | None = None) -> Call:
        """Hand a call to the executor, which has none."""
        x = torch.randn(ROWS, 8) if x is None else x
        self.left = len(x)
        return Call(self.executor, x)

    def compute_all(self, call: Call) -> None:
        while self.left:
            assert self.executor.advance()
        call.join()

    def serve(self, name: str, num_steps: int, between: Callable[[], object]) -> float:
        """A request of so many steps, and other work after each of them. Returns its duration."""
        began = self.clock.now
        self.promise.add(name)
        for _ in range(num_steps):
            self.clock.now += STEP_S
            self.promise.served(STEP_S, shared_s=STEP_S, num_served=1)
            between()
        self.promise.release(name)
        return self.clock.now - began


class Call:
    """A call that waits in a thread of its own, as the base server's does."""

    def __init__(self, executor: EngineExecutor, x: torch.Tensor) -> None:
        self.error: BaseException | None = None
        self.y: Sequence[torch.Tensor] = ()
        handed = threading.Event()
        executor.wake = handed.set

        def compute() -> None:
            try:
                self.y = executor.compute(Direction.FORWARD, 0, 1, [x])
            except (RuntimeError, Stopped) as error:
                self.error = error

        self._thread = threading.Thread(target=compute)
        self._thread.start()
        assert handed.wait(PATIENCE_S)

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    found = Case(monkeypatch)
    yield found
    found.executor.close()


def test_an_idle_engine_computes_calls_at_once(case: Case) -> None:
    """In few pieces: the first one has few rows, because its price is not known, and none takes over 0.2 s."""
    x = torch.randn(6 * ROWS, 8)
    call = case.call(x)
    case.compute_all(call)
    torch.testing.assert_close(call.y[0], case.layer(x).detach())
    assert case.rows[0] == FIXED_ROWS and len(case.rows) < 7
    assert max(case.rows[1:]) == pytest.approx(0.2 / ROW_S - FIXED_ROWS, abs=1)
    assert not case.executor.advance() and not case.executor.waits
    call = case.call()
    assert case.executor.advance() and case.rows[-1] == ROWS, "a call was cut without need"
    call.join()


def test_rows_run_beside_requests_only_with_room(case: Case) -> None:
    """A call is cut into pieces, no piece takes more than there is room for, and requests stay within the promise."""
    case.serve("first", 20, lambda: None)
    x = torch.randn(3 * ROWS, 8)
    call = case.call(x)

    def advance() -> None:
        room_s, before = case.promise.room_s, len(case.rows)
        if not case.left:
            return
        if case.executor.advance():
            assert before == 0 or ROW_S * (case.rows[before] + FIXED_ROWS) <= room_s
        else:
            assert case.executor.waits and case.executor.fits_later

    assert case.serve("second", 20, advance) <= SLOWDOWN * 20 * STEP_S
    assert len(case.rows) > 2 and sum(case.rows) == 3 * ROWS and min(case.rows[:-1]) >= FIXED_ROWS
    call.join()
    torch.testing.assert_close(call.y[0], case.layer(x).detach())
    # The control: without the promise a request takes too long.
    case.promise.slowdown, call = math.inf, case.call(x)
    while case.left > 2 * ROWS:
        case.executor.advance()
    assert case.serve("third", 2, lambda: case.compute_all(call)) > SLOWDOWN * 2 * STEP_S


def test_a_call_without_room_waits_until_the_engine_was_quiet(case: Case) -> None:
    case.compute_all(case.call())  # its price is known from now on
    for number in range(8):
        case.promise.add(str(number))
        case.clock.now += 0.01  # less time than a piece takes
        case.promise.release(str(number))
    before, call = len(case.rows), case.call()
    assert not case.executor.advance()
    assert case.executor.waits and not case.executor.fits_later and len(case.rows) == before
    retry_s = case.executor.retry_s
    assert retry_s is not None and 0 < retry_s <= QUIET_S
    case.clock.now += retry_s
    assert case.executor.advance() and case.rows[before:] == [ROWS]
    call.join()
    assert not case.executor.advance() and case.executor.retry_s is None


def test_a_price_that_was_once_too_high_is_measured_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load without a pause; the first piece of a kind took longer than any request leaves room for."""
    case.serve("first", 20, lambda: None)
    call, usual = case.call(), BaseExecutor.compute

    def slow(*arguments: Any) -> Any:
        case.clock.now += 5.0
        return usual(*arguments)

    monkeypatch.setattr(BaseExecutor, "compute", slow)
    case.executor.advance()
    monkeypatch.setattr(BaseExecutor, "compute", usual)
    began, rows = case.clock.now, []

    def advance() -> None:
        case.executor.advance()
        rows.append((case.clock.now - began, len(case.rows)))

    for number in range(10):
        case.serve(str(number), 20, advance)
    assert {count for seconds, count in rows if seconds < QUIET_S} == {1}, "the promise was not kept"
    assert not case.left
    call.join()


class Training:
    """Short pieces without end."""

    def __init__(self, case: Case, piece_s: float) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.waits = self.fits_later = False
        self.retry_s: float | None = None
        self.spent_s = 0.0
        self._case, self._piece_s = case, piece_s

    def advance(self) -> bool:
        promise = self._case.promise
        self.waits, self.fits_later = self._piece_s > promise.room_s, self._piece_s <= promise.longest_s
        if not self.waits:
            self._case.clock.now += self._piece_s
            promise.spent(self._piece_s)
            self.spent_s += self._piece_s
        return not self.waits


def beside(case: Case, training: Training, advance: Callable[[], bool]) -> tuple[float, float]:
    """Time of clients' calls beside requests, one call after the other, and the longest request."""
    case.serve("first", 20, lambda: None)
    call = case.call()
    before, trained = case.promise.spent_s, training.spent_s

    def between() -> None:
        nonlocal call
        while advance():  # an engine runs one piece at most; this leaves no room unused
            if not case.left:
                call.join()
                call = case.call()

    longest_s = max(case.serve(str(number), 20, between) for number in range(10))
    while case.left:
        case.clock.now += QUIET_S
        case.executor.advance()
    call.join()
    return case.promise.spent_s - before - (training.spent_s - trained), longest_s


@pytest.mark.parametrize("piece_s", [1e-3, 0.02, 0.06])
def test_trainings_and_clients_share_what_requests_leave(case: Case, piece_s: float) -> None:
    """Each has about half of the time, whether its pieces are shorter or longer, and requests keep their promise."""
    training = Training(case, piece_s)
    called_s, longest_s = beside(case, training, WorkByTurns(training, case.executor, case.promise, case.clock).advance)
    assert 0.4 < called_s / (called_s + training.spent_s) < 0.6
    assert longest_s <= SLOWDOWN * 20 * STEP_S
    if piece_s == 1e-3:  # the control: without turns short pieces take all room
        training = Training(case, piece_s)
        called_s, _ = beside(case, training, lambda: training.advance() or case.executor.advance())
        assert called_s < 0.1 * training.spent_s


class Unlucky(Training):
    """Its piece seems to fit in a request, and never does."""

    def advance(self) -> bool:
        self.waits = self.fits_later = True
        return False


def test_a_piece_that_never_fits_stops_others_for_half_of_the_time(case: Case) -> None:
    training = Unlucky(case, 0.02)
    turns = WorkByTurns(training, case.executor, case.promise, case.clock)
    alone_s, _ = beside(case, training, case.executor.advance)
    called_s, longest_s = beside(case, training, turns.advance)
    assert called_s > 0.4 * alone_s and longest_s <= SLOWDOWN * 20 * STEP_S


def test_an_idle_kind_of_work_has_no_claim_on_the_time_of_its_absence(case: Case) -> None:
    training = Training(case, 0.01)
    turns = WorkByTurns(training, case.executor, case.promise, case.clock)
    for _ in range(1000):
        assert turns.advance()
    assert training.spent_s == pytest.approx(10)
    before_s, trained_s = case.promise.spent_s, training.spent_s
    call = case.call()
    for _ in range(10):
        while case.left:
            turns.advance()
        call.join()
        call = case.call()
    trained_s = training.spent_s - trained_s
    assert trained_s > 0.4 * (case.promise.spent_s - before_s), "trainings were stopped for long"
    case.executor.close()
    call.join()


def test_an_error_of_a_product_reaches_the_call_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(BaseExecutor, "compute", lambda *_: dict[str, int]()["layer"])
        call = case.call()
        assert case.executor.advance()
        call.join()
    assert isinstance(call.error, RuntimeError) and "KeyError: 'layer'" in str(call.error)
    call = case.call()
    case.compute_all(call)
    assert call.error is None
    call = case.call()
    case.executor.close()
    call.join()
    assert isinstance(call.error, Stopped)
    with pytest.raises(Stopped):
        case.executor.compute(Direction.FORWARD, 0, 1, [torch.zeros(1, 8)])


# -- clients of a server whose products wait --------------------------------------------------------------------------

OLD, NEW = (Token(name=name, secret=name * 16) for name in "on")


class Waiting:
    """A server with the test as its engine, which calls `executor.advance`.

    Attributes:
        errors: Of calls, by group.
        woken: Set when the engine is to look for work.
    """

    def __init__(self, folder: Path) -> None:
        layers = {"one": nn.Linear(8, 6), "two": nn.Linear(8, 7)}
        promise = LatencyPromise(1.15, time.monotonic, 4)
        self.address = f"unix:{folder}/base.sock"
        self.executor = EngineExecutor(layers, name="two", promise=promise, clock=time.monotonic)
        self.server = BaseServer(self.executor, CallQueue(), Limits(max_clients=2), tokens=(OLD, NEW))
        self.executor.attend = self.server.attend
        self.woken = threading.Event()
        self.executor.wake = self.woken.set
        self.server.listen(transport.listen(Address.parse(self.address)))
        self.errors: dict[int, VLoraError | None] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._stop.is_set,))
        self._thread.start()

    def connect(self, token: Token = OLD, **settings: Any) -> Base:
        return connect(self.address, token=token.secret, **settings)

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

    def compute(self, call: threading.Thread, group: int) -> None:
        until(self.executor.advance)
        call.join(PATIENCE_S)
        assert self.errors[group] is None

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


def test_a_client_is_admitted_while_the_product_of_another_waits(waiting: Waiting) -> None:
    with waiting.connect() as first:
        call = waiting.call(first, 0)
        waiting.connect(patience_s=2.0).close()
        assert not waiting.errors, "the product did not wait"
        waiting.compute(call, 0)


def test_a_product_that_nobody_waits_for_is_not_computed(waiting: Waiting) -> None:
    """It would keep the calls of others waiting, for ever if there is no room for it."""
    first = waiting.connect(patience_s=0.5)
    call = waiting.call(first, 0)
    waiting.woken.clear()
    call.join(PATIENCE_S)
    assert isinstance(waiting.errors[0], Disconnected)
    assert waiting.woken.wait(PATIENCE_S), "an engine that sleeps would not look"
    assert not waiting.executor.advance() and waiting.executor.num_rows == 0
    first.close()
    until(lambda: waiting.server.num_clients == 0)
    with waiting.connect() as second:
        waiting.compute(waiting.call(second, 1), 1)
    assert waiting.executor.num_rows == 4


def test_a_token_that_is_removed_or_expires_closes_its_connections(waiting: Waiting) -> None:
    """Those of others remain."""
    with waiting.connect() as old, waiting.connect(NEW) as new:
        until(lambda: waiting.server.num_clients == 2)
        waiting.server.admission.tokens = (NEW,)
        until(lambda: waiting.server.num_clients == 1)
        with pytest.raises(Unauthorized):
            old.calls.call(Direction.FORWARD, 0, 1, [torch.ones(4, 8)])
        waiting.compute(waiting.call(new, 1), 1)
        soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.3)
        waiting.server.admission.tokens = (dataclasses.replace(NEW, expires=soon),)
        until(lambda: waiting.server.num_clients == 0)
