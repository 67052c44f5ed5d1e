"""Candidates timed against each other.

Told apart by trimmed means: a float32 product on factors that come from memory takes 0.7 ms one time and 1.1 ms the
next (docs/decisions.md, 2026-11-22), so that the least time is a lottery, and so is the median where both are as
frequent. Their order is drawn anew at every turn, for each leaves the caches and the clock of the processor to the next
in a state of its own.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

_FIRST_TURNS = 2  # before anyone can fall behind
_KEPT = 0.8  # of a candidate's calls, the shortest: what interrupted the others is no part of them


def race(
    calls: Mapping[str, Callable[[], float]], turns: int, in_race: float, enough_s: float, seed: int = 0
) -> dict[str, float]:
    """Seconds of each candidate, a trimmed mean.

    calls: each runs once and returns its seconds; a first call of each prepares, and does not count.
    turns: how often each is timed at most; fewer where the turns have taken `enough_s` for each still in the race.
    in_race: times the least mean so far; who has never been as fast as that is not timed again. One call is enough to
    stay: some are slow for the first two or three times, and then the fastest.
    """
    for call in calls.values():
        call()
    draw = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    running, started = list(calls), time.monotonic()
    for turn in range(1, turns + 1):
        draw.shuffle(running)
        for name in running:
            seconds[name].append(calls[name]())
        if turn < _FIRST_TURNS:
            continue
        least = min(map(trimmed_mean, seconds.values()))
        running = [name for name in running if min(seconds[name]) <= in_race * least]
        if len(running) == 1 or time.monotonic() - started > enough_s * len(running):
            break
    return {name: trimmed_mean(taken) for name, taken in seconds.items()}


def trimmed_mean(seconds: Sequence[float]) -> float:
    """Mean of the shortest four fifths."""
    return statistics.fmean(sorted(seconds)[: max(1, int(_KEPT * len(seconds)))])
