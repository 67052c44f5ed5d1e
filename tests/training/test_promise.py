"""The engine's trainings keep the latency promise by the prices of their pieces; the clock is the test's."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.training.beside import Alone, Case, Running, losses_of, request
from vlora.engine import Engine
from vlora.orchestrator.latency_promise import QUIET_S, PiecePrices
from vlora.training.adapter import LoraSettings, TrainableLora
from vlora.training.loop import Piece, TrainingLoop
from vlora.training.trainer import PackedTrainer

PIECE_S = 0.01


class Clock:
    """Advances with each reading, so that a piece takes `PIECE_S` or a little more."""

    now = 0.0

    def __call__(self) -> float:
        self.now += PIECE_S
        return self.now


def idle(case: Case, results: str, slowdown: float = 1.5, **changes: Any) -> tuple[Running, Clock]:
    """An engine with a training that is idle since long."""
    clock = Clock()
    trainings = ["first", "second"] if results == "created" else ["first"]
    plan = str(case.plan(results, trainings, **{"steps": 1000, **changes}))
    on = Running(Engine(case.config(train=plan, train_slowdown=slowdown), clock=clock))
    clock.now += 100
    return on, clock


def test_pieces_run_beside_requests_only_with_room(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    on, clock = idle(case, "promised")
    promise = on.trainings.promise
    on.settle(most=200)  # no request yet: any time
    assert on.status.waiting is None
    on.engine.add(request("first", None, 4))
    assert not on.trainings.advance(), "the request has earned nothing yet"
    assert on.status.waiting == "requests run; the promise leaves no room at present"
    promise.served(1.0)  # as by a long step
    room = promise.room_s
    assert room > 0.3 and on.trainings.advance()
    assert room - 0.2 < promise.room_s < room, "the piece was not charged"
    run_piece = TrainingLoop.run_piece

    def slow(loop: TrainingLoop) -> None:
        run_piece(loop)
        clock.now += 10

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "run_piece", slow)
        before = promise.spent_s
        assert on.trainings.advance() and promise.spent_s - before > 10, "a piece is charged as it was, at any price"
    assert not on.trainings.advance() and promise.room_s < -9
    on.serve()
    # An idle engine runs pieces of at most half of a usual request's time.
    assert 0 < 2 * promise.usual_room_s < 100
    on.engine.close()


def loaded(case: Case, results: str, idle_s: float, **changes: Any) -> Running:
    """An engine in a micro-step, after requests of a second each with pauses between them, and with a new one."""
    on, clock = idle(case, results, **changes)
    on.settle(most=200)
    promise = on.trainings.promise
    for number in range(60):
        promise.add(str(number))
        clock.now += 1
        promise.served(1.0)
        promise.release(str(number))
        clock.now += idle_s
    on.engine.add(request("first", None, 4))
    return on


@pytest.mark.parametrize(
    ("idle_s", "expected"), [(0.0, "no room under the promise at this load: a piece takes 0.0"), (1.0, None)]
)
def test_the_operator_sees_a_load_that_leaves_no_room(case: Case, idle_s: float, expected: str | None) -> None:
    """Steps fill the time. Negative control: with the same requests and half of the time idle there is room."""
    on = loaded(case, f"load {idle_s}", idle_s, batch=1)
    assert on.trainings.advance() == (expected is None)
    assert on.status.waiting is None if expected is None else str(on.status.waiting).startswith(expected)
    on.engine.close()


@pytest.mark.parametrize(("idle_s", "is_replaced"), [(0.01, True), (1.0, False)])
def test_a_micro_step_that_fits_an_idle_engine_only_is_replaced_at_a_high_load(
    case: Case, idle_s: float, is_replaced: bool
) -> None:
    """A busy engine is rarely idle, so the training would stand still. At a lower load its pieces run."""
    on = loaded(case, f"coarse {idle_s}", idle_s)
    before = on.status.seconds
    assert on.trainings.advance(), "a piece, or a smaller micro-step"
    assert (on.status.seconds == before) == is_replaced
    assert on.trainings.promise.usual_room_s > 0.4, "an idle engine has room for the pieces before"
    on.engine.close()


def test_pieces_that_are_too_long_wait_for_a_quiet_engine(case: Case) -> None:
    on, clock = idle(case, "long", 1.0001, steps=3, micro_batch_tokens=30)
    place = lambda: on.trainings.jobs[0].progress.place  # noqa: E731
    # Some layers of a micro-step that is not the first one of its optimizer step.
    on.settle(until=lambda: place() > 0)
    on.settle(most=6)
    assert place() > 0
    on.serve(request("first", None, 4))
    assert on.trainings.advance(), "the micro-step of several records was not replaced by a smaller one"
    assert not on.trainings.advance()
    assert "it runs when none was seen for 10 s" in str(on.status.waiting)
    retry_s = on.trainings.retry_s
    assert retry_s is not None and QUIET_S - 1 < retry_s < QUIET_S
    clock.now += retry_s
    assert on.trainings.advance()
    on.settle()
    on.engine.close()
    assert losses_of(case.folder / "long" / "first") == pytest.approx(Alone(case, ["first"]).losses["first"], abs=1e-6)


def test_an_adapter_is_created_in_a_piece_of_its_own(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a price, and is not created beside a request that leaves no room; one that was cancelled is not."""
    created: list[str] = []
    add = PackedTrainer.add

    def noted(trainer: PackedTrainer, name: str, settings: LoraSettings) -> TrainableLora:
        created.append(name)
        return add(trainer, name, settings)

    monkeypatch.setattr(PackedTrainer, "add", noted)
    on, _ = idle(case, "created", steps=3)
    assert on.trainings.advance() and created == ["first"]
    assert on.trainings.prices.expected_s(Piece("begin", 0)) >= PIECE_S
    on.engine.add(request("first", None, 4))
    assert not on.trainings.advance() and created == ["first"], "the request has earned nothing yet"
    on.trainings.cancel("second")
    on.serve()
    on.settle(most=10)
    assert created == ["first"]
    on.engine.close()


def test_prices_are_by_kind_and_token() -> None:
    prices = PiecePrices()
    assert prices.expected_s(Piece("layer", 100)) == 0
    for place in range(100):
        prices.observe(Piece("layer", 50), 0.5 if place % 50 else 5.0)
        prices.observe(Piece("update", 0), 0.1)
    assert prices.expected_s(Piece("layer", 100)) == pytest.approx(1.0), "few pieces may take longer"
    assert prices.expected_s(Piece("update", 0)) == pytest.approx(0.1)
    assert prices.expected_s(Piece("image", 0)) == 0 and not math.isnan(prices.expected_s(Piece("image", 0)))
