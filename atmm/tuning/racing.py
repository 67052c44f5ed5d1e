"""Timing of candidates against each other.

Candidates are compared by trimmed means: a float32 product on factors read from memory takes 0.7 ms in some calls and
1.1 ms in others (docs/decisions/0010), so that the minimum is random, and so is the median if both occur
equally often. The order is shuffled in every turn, because each candidate leaves the caches and the clock frequency of
the processor in a different state.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

_FIRST_TURNS = 2  # no candidate is eliminated before
_KEPT = 0.8  # share of a candidate's calls that count, the shortest: interruptions lengthen the others


def race(
    calls: Mapping[str, Callable[[], float]], turns: int, in_race: float, enough_s: float, seed: int = 0
) -> dict[str, float]:
    """Time the candidates and return the trimmed mean in seconds of each.

    Args:
        calls: each call runs the candidate once and returns its seconds. The first call of each is a warm-up and does
            not count.
        in_race: multiple of the smallest mean so far. A candidate without any call as fast as that is eliminated. A
            single fast call is enough, because some candidates are slow in their first two or three calls and fastest
            afterwards.
        enough_s: seconds per remaining candidate after which the race ends early.
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
