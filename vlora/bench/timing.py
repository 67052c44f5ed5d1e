"""CPU time, pair by pair: what can be trusted on a shared machine is the ratio of two things run side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from vlora.engine.cpu_cores import default_threads


def work_seconds(device: torch.device) -> Callable[[], float]:
    """A clock of what is done on a device.

    With one thread of a CPU, the process's own CPU seconds, so that other work on the machine does not look like the
    model's. With several threads, and on a GPU, the time that passes: nothing else may run there.
    """
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if one_thread else time.perf_counter


@contextmanager
def threads(number: int) -> Iterator[None]:
    """torch computes with so many threads until the block ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_counts() -> list[int]:
    """What benches measure: the threads of a server by default, then one."""
    return sorted({default_threads(), 1}, reverse=True)


def in_words(num_threads: int) -> str:
    return "1 thread" if num_threads == 1 else f"{num_threads} threads"


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """CPU seconds of each candidate, `rounds` times, in turn A B C A B C ..., after `warmup` rounds not counted.

    clock: `time.perf_counter` where several threads work, whose idle ones spin.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warmup + rounds):
        for name, call in candidates.items():
            started = clock()
            call()
            if turn >= warmup:
                seconds[name].append(clock() - started)
    return seconds


def median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def median_ratio(seconds: Sequence[float], baseline: Sequence[float]) -> float:
    """Median over the pairs of one round: drift of the machine's speed cancels out."""
    return statistics.median(a / b for a, b in zip(seconds, baseline, strict=True))
