"""Requests that arrive at given times while an engine runs its steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence

from vlora.bench.timed_engine import TimedEngine
from vlora.engine import Engine
from vlora.types import RequestOutput


class Clock:
    """Seconds of a clock, and the time that was skipped.

    Args:
        seconds: Of work, such as `time.thread_time`.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return self._seconds() + self.skipped_s

    def skip_to(self, when_s: float) -> None:
        """Let the time pass until `when_s`, which may be over."""
        self.skipped_s += max(0.0, when_s - self())


class WallClock(Clock):
    """Real time, in which nothing is skipped."""

    def __init__(self) -> None:
        super().__init__(time.perf_counter)

    def skip_to(self, when_s: float) -> None:
        time.sleep(max(0.0, when_s - self()))


def poisson(rate: float, number: int, seed: int = 0) -> list[float]:
    """Times of arrival from 0, in order."""
    draws = random.Random(seed)
    times = [0.0]
    for _ in range(number - 1):
        times.append(times[-1] + draws.expovariate(rate))
    return times


def steps(
    engine: TimedEngine | Engine,
    times: Sequence[float],
    add: Callable[[int], None],
    clock: Clock,
    idle: Callable[[float], None] | None = None,
) -> Iterator[tuple[RequestOutput, ...]]:
    """The outputs of each step until all requests have ended.

    Args:
        engine: Without other work.
        times: Seconds from now at which requests are due, in order.
        add: Adds the request with this number, when it is due or at the end of the step that runs then.
        clock: Of the times.
        idle: Called with the time of the next arrival while the engine has no work; by default the clock skips to it.
    """
    began, added = clock(), 0
    while added < len(times) or engine.has_work:
        while added < len(times) and began + times[added] <= clock():
            add(added)
            added += 1
        if engine.has_work:
            yield engine.step()
        elif added < len(times):
            (idle or clock.skip_to)(began + times[added])
