"""The conditions under which a stage runs: its device, its folder, and its time; and the time of calls on that device:
replays of CUDA graphs or host-timed calls on a GPU, the call itself on a CPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from atmm.tuning.timing import Replays


@dataclasses.dataclass(frozen=True)
class Context:
    device: torch.device
    out: Path  # the folder of the results, for files that are results by themselves
    ends_s: float  # on `time.monotonic`, when the stage is ended
    keep: Callable[[dict[str, Any]], None]  # writes the results so far, lost otherwise if the stage is ended

    @property
    def on_gpu(self) -> bool:
        """Whether shapes are those of a 7B model; on a CPU they are small."""
        return self.device.type == "cuda"

    @property
    def gpu(self) -> str:
        """The GPU whose goals in units of time apply, H200 or H100; "" where there are none."""
        name = torch.cuda.get_device_name(self.device) if self.on_gpu else ""
        return next((each for each in ("H200", "H100") if each in name), "")

    @property
    def left_s(self) -> float:
        """Seconds until the stage is ended."""
        return self.ends_s - time.monotonic()

    def while_time(self, items: Iterator[Any] | list[Any], reserve_s: float) -> Iterator[Any]:
        """The items, until only `reserve_s` seconds are left."""
        for item in items:
            if self.left_s < reserve_s:
                return
            yield item

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


REPEATS, _SMALL_REPEATS = 20, 3


def device_times(context: Context, call: Callable[[], object], parts: int = 1) -> list[float]:
    """Seconds of a call that can be captured, divided by `parts`, in order of size.

    On a GPU these are replays of a graph, so launches by the host do not count.
    """
    timed = Replays(call) if context.on_gpu else lambda: elapsed(call, context)
    timed()
    return sorted(timed() / parts for _ in range(repeats(context)))


def device_seconds(context: Context, call: Callable[[], object], parts: int = 1) -> float:
    return statistics.median(device_times(context, call, parts))


def host_seconds(context: Context, call: Callable[[], object], warmup: int = 1) -> list[float]:
    """Seconds of each call until the device has finished it."""
    for _ in range(warmup):
        call()
    return [elapsed(call, context) for _ in range(repeats(context))]


def loop_seconds(context: Context, call: Callable[[], object], warmup: int) -> list[float]:
    """Seconds of each call in a loop, as a server runs its steps: a call returns while the device still works."""
    for _ in range(warmup):
        call()
    marks = [time.perf_counter()]
    for _ in range(repeats(context)):
        call()
        marks.append(time.perf_counter())
    return [stop - start for start, stop in itertools.pairwise(marks)]


def launch_seconds(context: Context, call: Callable[[], object]) -> list[float]:
    """Seconds of the host in each call on a GPU: the device is idle before it and is not waited for after it."""
    found = []
    for _ in range(repeats(context)):
        context.synchronize()
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return found


def repeats(context: Context) -> int:
    return REPEATS if context.on_gpu else _SMALL_REPEATS


_WIDTH, _SMALL_WIDTH = 4096, 256


def memory_speeds(context: Context) -> dict[str, float]:
    """Bytes per second of kernels that read a large matrix, and of its copy, which counts both sides. No kernel is the
    fastest on every GPU."""
    width = _WIDTH if context.on_gpu else _SMALL_WIDTH
    matrix = torch.ones(32 * width, width, dtype=torch.bfloat16, device=context.device)
    rows, target = matrix[:16].clone(), torch.empty_like(matrix)
    calls: dict[str, Callable[[], object]] = {
        "sum": matrix.sum,
        "largest": matrix.amax,
        "product with a vector": lambda: torch.mv(matrix, rows[0]),
        "product with 16 rows": lambda: torch.mm(rows, matrix.t()),
        "copy": lambda: target.copy_(matrix),
    }
    return {
        name: matrix.nbytes * (2 if name == "copy" else 1) / device_seconds(context, call)
        for name, call in calls.items()
    }


def memory_speed(context: Context) -> float:
    """The best of `memory_speeds`, by which floors are computed."""
    return max(memory_speeds(context).values())


def elapsed(call: Callable[[], object], context: Context) -> float:
    context.synchronize()
    started = time.perf_counter()
    call()
    context.synchronize()
    return time.perf_counter() - started
