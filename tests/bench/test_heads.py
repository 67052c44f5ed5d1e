"""The goals of `vlora bench heads`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from vlora.bench.dummy import small_config
from vlora.bench.engine import heads
from vlora.bench.engine.heads import floor_of, goal_of


@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_the_floor_is_products_beside_decoding(slow: float) -> None:
    """A slow round affects all of its times."""
    products, decoding = ([seconds * each for each in (1.0, slow, 1.0)] for seconds in (0.4, 0.6))
    assert floor_of(products, decoding) == pytest.approx(0.4)
    assert floor_of(products, [-0.01]) == 1, "decoding that is within the noise"


def test_decoding_is_timed_within_a_call() -> None:
    engine = heads.HeadEngine(small_config(), with_products=True)
    assert engine.ask(2, 1, 0) == 0.0 == engine.ask(2, 1, 1)
    few, many = engine.ask(2, 1, 2), engine.ask(2, 1, 30)
    assert 0.0 < few < many
    assert len(engine.factors(2, 1)) > 0


@pytest.mark.parametrize(
    ("batch", "floor", "goal"), [(1, 0.25, 0.59), (8, 0.25, 0.8), (1, 0.6, 0.69), (8, 0.9, 1.035), (1, 1.0, 1.05)]
)
def test_a_head_may_take_longer_than_words_by_noise_only(batch: int, floor: float, goal: float) -> None:
    assert goal_of(batch, floor) == pytest.approx(goal)


def test_warm_up_is_no_decoding() -> None:
    class Engine:
        has_products = True

        def __init__(self) -> None:
            self.decode_s = iter((900.0, 900.0))

        def ask(self, batch: int, frames: int, answer_tokens: int) -> float:
            return next(self.decode_s, 1.0) if answer_tokens else 0.0

        def factors(self, batch: int, frames: int) -> list[object]:
            return []

        def prompt_len(self, frames: int) -> int:
            return 1

    rows = heads.measure_tower("tower", Engine(), [(1, 1), (1, 4)], 1, 100.0)  # type: ignore[arg-type]
    assert [row["decoding ms"] for row in rows] == [1000.0] * 4


@pytest.mark.parametrize("has_products", [True, False])
@pytest.mark.parametrize(("limit_s", "measured"), [(100.0, [1, 4, 8]), (5.0, [1, 4]), (0.5, [1])])
def test_shapes_after_one_that_takes_too_long_are_left_out(
    limit_s: float, measured: list[int], has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine:
        batch = 0

        def __init__(self) -> None:
            self.has_products = has_products

        def ask(self, batch: int, frames: int, answer_tokens: int) -> float:
            self.batch = batch
            return 0.0

        def factors(self, batch: int, frames: int) -> list[object]:
            return []

        def prompt_len(self, frames: int) -> int:
            return 1

    engine = Engine()

    def timed(calls: Mapping[str, Callable[[], object]], *_: object, **__: object) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return {name: [engine.batch / 2] for name in calls}

    monkeypatch.setattr(heads, "interleaved", timed)
    shapes = [(batch, 1) for batch in (1, 4, 8)]
    rows = heads.measure_tower("tower", engine, shapes, 1, limit_s)  # type: ignore[arg-type]
    assert list(dict.fromkeys(row["batch"] for row in rows)) == measured
    assert [row["floor"] for row in rows] == [1.0 if has_products else None] * len(rows)
