"""The engine's trainings keep the latency promise by the prices of their pieces; the clock is the test's."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.training.beside import Alone, Case, losses_of, request, settle
from vlora.engine import Engine
from vlora.engine.piece_prices import PiecePrices
from vlora.orchestrator.latency_promise import QUIET_S
from vlora.training import LoraSettings, PackedTrainer, TrainableLora
from vlora.training.loop import Piece

PIECE_S = 0.01


class Clock:
    """Advances with each reading, so that a piece takes `PIECE_S` or a little more."""

    now = 0.0

    def __call__(self) -> float:
        self.now += PIECE_S
        return self.now


def test_pieces_run_beside_requests_only_with_room(case: Case) -> None:
    clock = Clock()
    config = case.config(train=str(case.plan("promised", ["first"], steps=1000)), train_slowdown=1.5)
    engine = Engine(config, clock=clock)
    trainings = engine.parts.trainings
    clock.now += 100  # an engine that is idle since long
    settle(trainings, engine, most=200)  # no request yet: any time
    assert trainings.statuses()[0].waiting is None
    engine.add(request("first", None, 4))
    assert not trainings.advance(), "the request has earned nothing yet"
    assert trainings.statuses()[0].waiting == "requests run; the promise leaves no room at present"
    trainings.promise.served(1.0)  # as by a long step
    room = trainings.promise.room_s
    assert room > 0.3 and trainings.advance()
    assert room - 0.2 < trainings.promise.room_s < room, "the piece was not charged"
    while engine.has_work:
        engine.step()
    # An idle engine runs pieces of at most half of a usual request's time.
    usual_s = 2 * trainings.promise.usual_room_s
    assert 0 < usual_s < 100
    assert trainings.advance()
    engine.close()


def loaded(case: Case, results: str, idle_s: float, **changes: Any) -> tuple[Engine, Clock]:
    """An engine in a micro-step, after requests of a second each with pauses between them, and with a new one."""
    clock = Clock()
    plan = case.plan(results, ["first"], steps=1000, **changes)
    engine = Engine(case.config(train=str(plan), train_slowdown=1.5), clock=clock)
    trainings = engine.parts.trainings
    clock.now += 100  # an engine that is idle since long
    settle(trainings, engine, most=200)
    for number in range(60):
        trainings.promise.add(str(number))
        clock.now += 1
        trainings.promise.served(1.0)
        trainings.promise.release(str(number))
        clock.now += idle_s
    engine.add(request("first", None, 4))
    return engine, clock


@pytest.mark.parametrize(
    ("idle_s", "expected"), [(0.0, "no room under the promise at this load: a piece takes 0.0"), (1.0, None)]
)
def test_the_operator_sees_a_load_that_leaves_no_room(case: Case, idle_s: float, expected: str | None) -> None:
    """Steps fill the time. Negative control: with the same requests and half of the time idle there is room."""
    engine, _ = loaded(case, f"load {idle_s}", idle_s, batch=1)
    trainings = engine.parts.trainings
    assert trainings.advance() == (expected is None)
    waiting = trainings.statuses()[0].waiting
    assert waiting is None if expected is None else waiting is not None and waiting.startswith(expected)
    engine.close()


@pytest.mark.parametrize(("idle_s", "is_replaced"), [(0.01, True), (1.0, False)])
def test_a_micro_step_that_fits_an_idle_engine_only_is_replaced_at_a_high_load(
    case: Case, idle_s: float, is_replaced: bool
) -> None:
    """A busy engine is rarely idle, so the training would stand still. At a lower load its pieces run."""
    engine, _ = loaded(case, f"coarse {idle_s}", idle_s)
    trainings = engine.parts.trainings
    before = trainings.statuses()[0].seconds
    assert trainings.advance(), "a piece, or a smaller micro-step"
    assert (trainings.statuses()[0].seconds == before) == is_replaced
    assert trainings.promise.usual_room_s > 0.4, "an idle engine has room for the pieces before"
    engine.close()


def test_pieces_that_are_too_long_wait_for_a_quiet_engine(case: Case) -> None:
    clock = Clock()
    config = case.config(train=str(case.plan("long", ["first"], micro_batch_tokens=30)), train_slowdown=1.0001)
    engine = Engine(config, clock=clock)
    trainings = engine.parts.trainings
    clock.now += 100  # an engine that is idle since long
    # Some layers of a micro-step that is not the first one of its optimizer step.
    settle(trainings, engine, until=lambda: trainings.jobs[0].progress.place > 0)
    settle(trainings, engine, most=6)
    assert trainings.jobs[0].progress.place > 0
    engine.add(request("first", None, 4))
    while engine.has_work:
        engine.step()
    assert trainings.advance(), "the micro-step of several records was not replaced by a smaller one"
    assert not trainings.advance()
    waiting = trainings.statuses()[0].waiting
    assert waiting is not None and "it runs when none was seen for 10 s" in waiting
    retry_s = trainings.retry_s
    assert retry_s is not None and QUIET_S - 1 < retry_s < QUIET_S
    clock.now += retry_s
    assert trainings.advance()
    settle(trainings, engine)
    engine.close()
    assert losses_of(case.folder / "long" / "first") == pytest.approx(Alone(case, ["first"]).losses["first"], abs=1e-6)


def test_an_adapter_is_created_in_a_piece_of_its_own(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a price, and is not created beside a request that leaves no room; one that was cancelled is not."""
    clock = Clock()
    engine = Engine(case.config(train=str(case.plan("created")), train_slowdown=1.5), clock=clock)
    trainings = engine.parts.trainings
    created: list[str] = []
    add = PackedTrainer.add

    def noted(trainer: PackedTrainer, name: str, settings: LoraSettings) -> TrainableLora:
        created.append(name)
        return add(trainer, name, settings)

    monkeypatch.setattr(PackedTrainer, "add", noted)
    clock.now += 100
    assert trainings.advance() and created == ["first"]
    assert trainings.prices.expected_s(Piece("begin", 0)) >= PIECE_S
    engine.add(request("first", None, 4))
    assert not trainings.advance() and created == ["first"], "the request has earned nothing yet"
    trainings.cancel("second")
    while engine.has_work:
        engine.step()
    settle(trainings, engine, most=10)
    assert created == ["first"]
    engine.close()


def test_prices_are_by_kind_and_token() -> None:
    prices = PiecePrices()
    assert prices.expected_s(Piece("layer", 100)) == 0
    for place in range(100):
        prices.observe(Piece("layer", 50), 0.5 if place % 50 else 5.0)
        prices.observe(Piece("update", 0), 0.1)
    assert prices.expected_s(Piece("layer", 100)) == pytest.approx(1.0), "few pieces may take longer"
    assert prices.expected_s(Piece("update", 0)) == pytest.approx(0.1)
    assert prices.expected_s(Piece("image", 0)) == 0 and not math.isnan(prices.expected_s(Piece("image", 0)))
