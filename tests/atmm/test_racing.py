"""Timing of candidates against each other: trimmed means, shuffled order, and elimination of slow candidates."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable

from atmm.tuning.racing import race


def scripted(*seconds: float, log: list[str] | None = None, name: str = "") -> Callable[[], float]:
    """A candidate that takes these seconds, call by call, and then repeats the last one."""
    rest = itertools.chain(seconds, itertools.repeat(seconds[-1]))

    def call() -> float:
        if log is not None:
            log.append(name)
        return next(rest)

    return call


def run(log: list[str], **candidates: Iterable[float]) -> dict[str, float]:
    calls = {name: scripted(*seconds, log=log, name=name) for name, seconds in candidates.items()}
    return race(calls, turns=9, in_race=1.3, enough_s=60.0)


def test_the_first_call_prepares_and_does_not_count() -> None:
    assert run([], slow_to_start=(9.0, 1.0), steady=(1.1,)) == {"slow_to_start": 1.0, "steady": 1.1}


def test_slow_candidates_are_not_timed_again() -> None:
    log: list[str] = []
    seconds = run(log, fast=(1.0,), near=(1.2,), behind=(2.0,))
    assert seconds == {"fast": 1.0, "near": 1.2, "behind": 2.0}
    assert log.count("fast") == log.count("near") == 1 + 9
    assert log.count("behind") == 1 + 2


def test_a_candidate_with_slow_first_calls_stays_in_the_race() -> None:
    seconds = run([], late=(3.0, 3.0, 0.9, 0.8), steady=(1.0,))
    assert seconds["late"] < seconds["steady"]


def test_a_race_ends_with_one_candidate_left() -> None:
    log: list[str] = []
    run(log, fast=(1.0,), behind=(2.0,))
    assert len(log) == 2 * (1 + 2)


def test_one_fast_call_does_not_win_a_race() -> None:
    """One call in six takes two thirds of the time: the minimum of nine calls would be random."""
    draw = random.Random(1)
    lucky = [1.0, *(0.66 if draw.random() < 1 / 6 else 1.0 for _ in range(20))]
    seconds = run([], lucky=lucky, steady=(0.8,))
    assert min(lucky) < 0.8 < seconds["lucky"] and seconds["steady"] == 0.8


def test_the_order_of_candidates_is_shuffled() -> None:
    log: list[str] = []
    run(log, a=(1.0,), b=(1.0,), c=(1.0,))
    turns = [tuple(log[start : start + 3]) for start in range(3, len(log), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns) and len(set(turns)) > 2


def test_long_calls_need_fewer_turns() -> None:
    log: list[str] = []
    calls = {name: scripted(1.0, log=log, name=name) for name in "ab"}
    race(calls, turns=9, in_race=1.3, enough_s=0.0)
    assert len(log) == 2 * (1 + 2)
