"""Rounds of interleaved calls, with a fake clock."""

from __future__ import annotations

import math

import pytest

from vlora.bench.timing import interleaved


@pytest.mark.parametrize(
    ("limit_s", "rounds"),
    [(math.inf, 4), (100.0, 4), (6.0, 2), (2.0, 1), (0.0, 1)],
)
def test_no_round_begins_after_the_limit_but_one_counts(limit_s: float, rounds: int) -> None:
    now, calls = [0.0], []

    def call(name: str, seconds: float) -> None:
        calls.append(name)
        now[0] += seconds

    candidates = {"a": lambda: call("a", 1.0), "b": lambda: call("b", 2.0)}
    found = interleaved(candidates, 4, warmup=1, clock=lambda: now[0], limit_s=limit_s)
    assert found == {"a": [1.0] * rounds, "b": [2.0] * rounds}
    assert calls == ["a", "b"] * (1 + rounds)


def test_a_long_warm_up_is_cut_short() -> None:
    now = [0.0]

    def call() -> None:
        now[0] += 5.0

    assert interleaved({"a": call}, 9, warmup=3, clock=lambda: now[0], limit_s=4.0) == {"a": [5.0]}
    assert now[0] == 10.0
