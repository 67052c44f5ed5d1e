"""Kernels of a call, counted and timed by torch's profiler."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from vlora.bench.gpu.context import Context

_ROWS = 25


class Profile(NamedTuple):
    """One call."""

    launches: int  # kernels; on a CPU, where there are none, operators
    copies: int  # copies and fills of device memory; none on a CPU
    busy_s: float  # seconds with a kernel or a copy, or with several at once
    top: list[dict[str, Any]]  # the most expensive kernels or operators: name, count, and microseconds of all calls


def profiled(context: Context, call: Callable[[], object]) -> Profile:
    """Profile one call, after one that is not counted."""
    call()
    context.synchronize()
    activities = [ProfilerActivity.CUDA] if context.on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        call()
        context.synchronize()
    wanted = DeviceType.CUDA if context.on_gpu else DeviceType.CPU
    counts: Counter[str] = Counter()
    micros: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    num_copies = 0
    for event in recorded.events() or ():
        if event.device_type != wanted or event.cpu_parent is not None:
            continue
        counts[event.name] += 1
        micros[event.name] += event.time_range.elapsed_us()
        spans.append((event.time_range.start, event.time_range.end))
        num_copies += event.name.startswith(("Memcpy", "Memset"))
    top = [
        {"name": name[:160], "count": counts[name], "us": round(total, 1)} for name, total in micros.most_common(_ROWS)
    ]
    return Profile(counts.total() - num_copies, num_copies, covered(spans) / 1e6, top)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans, each from its start to its end."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def memory_gib(context: Context) -> float | None:
    """The most device memory that torch has held."""
    return torch.cuda.max_memory_reserved() / 2**30 if context.on_gpu else None
