"""Paired CPU time: on a shared machine, only the ratio of two interleaved measurements is reliable."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from vlora.engine.host_resources import default_threads

T = TypeVar("T")


def work_seconds(device: torch.device) -> Callable[[], float]:
    """A clock for work on a device.

    With one thread of a CPU, the process's own CPU seconds, which exclude other load on the machine. With several
    threads, and on a GPU, wall time: run no other load there. On a GPU the clock first waits for all launched work.
    """
    if device.type == "cuda":

        def after_launched_work() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return after_launched_work
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if one_thread else time.perf_counter


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set torch's number of threads until the end of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_counts() -> list[int]:
    """The thread counts of a bench: a server's default, then one."""
    return sorted({default_threads(), 1}, reverse=True)


def threads_label(num_threads: int) -> str:
    return "1 thread" if num_threads == 1 else f"{num_threads} threads"


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.process_time,
    limit_s: float = math.inf,
    *,
    shuffled: bool = False,
) -> dict[str, list[float]]:
    """Time each candidate `rounds` times, in turn A B C A B C ...

    Args:
        candidates: The calls, by name.
        rounds: Number of rounds.
        warmup: Rounds that do not count.
        clock: CPU seconds by default; `time.perf_counter` for candidates with several threads, because idle threads
            spin.
        limit_s: After this many seconds, warm-up included, no round begins, unless none counts yet: then the next one
            counts and is the last. Long calls need few rounds, since disturbances average out within each.
        shuffled: In a new random order each round.

    Returns:
        Seconds of each round, by candidate.
    """

    def timed(call: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            started = clock()
            call()
            return clock() - started

        return seconds

    timed_calls = {name: timed(call) for name, call in candidates.items()}
    return by_turns(timed_calls, rounds, warmup, clock, limit_s, shuffled=shuffled)


def by_turns(
    calls: Mapping[str, Callable[[], T]],
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    limit_s: float = math.inf,
    *,
    shuffled: bool = False,
) -> dict[str, list[T]]:
    """What each call returns, as in `interleaved`."""
    found: dict[str, list[T]] = {name: [] for name in calls}
    began, order, draw = clock(), list(calls), random.Random(0)
    for turn in range(warmup + rounds):
        late = clock() - began > limit_s
        if late and all(found.values()):
            break
        if shuffled:
            draw.shuffle(order)
        for name in order:
            result = calls[name]()
            if late or turn >= warmup:
                found[name].append(result)
    return found


def median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def median_ratio(seconds: Sequence[float], baseline: Sequence[float]) -> float:
    """Median over the pairs of one round, in which drift of the machine's speed cancels out."""
    return statistics.median(a / b for a, b in zip(seconds, baseline, strict=True))
