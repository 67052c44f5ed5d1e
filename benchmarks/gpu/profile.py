"""The kernels of a decode step and of a prefill step of a 7B model, counted and timed by torch's profiler."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from vlora.bench.gpu import models
from vlora.bench.gpu.context import Context
from vlora.bench.timed_engine import FixedModePolicy, Kind

_BATCH, _PROMPT, _PREFILL = 16, 1024, 2048
_SMALL_BATCH, _SMALL_PROMPT, _SMALL_PREFILL = 4, 16, 32
_KINDS = ("merged", "unmerged 8 x r16", "mixed")
_ROWS = 25


KINDS = (
    Kind("none", (None,), False),
    Kind("merged", ("r16-0",), True),
    Kind("unmerged 8 x r16", tuple(f"r16-{index}" for index in range(8)), False),
    Kind("unmerged 16 x r64", tuple(f"r64-{index}" for index in range(16)), False),
    # Every second request uses the merged adapter.
    Kind("mixed", tuple(f"r16-{index // 2 + 1 if index % 2 else 0}" for index in range(14)), True),
)


def run(context: Context) -> dict[str, Any]:
    """Profile a decode step of each mode, and a step with one prompt in each mode."""
    batch, prompt, prefill = (
        (_BATCH, _PROMPT, _PREFILL) if context.on_gpu else (_SMALL_BATCH, _SMALL_PROMPT, _SMALL_PREFILL)
    )
    model = models.built(context)
    policy = FixedModePolicy()
    found: dict[str, Any] = {}
    settings = {"max_batch_size": batch, "max_step_tokens": 4096}
    engine = models.timed_engine(context, model, {16: 8}, parts={"policy": policy}, context=prompt, **settings)
    for kind in (each for each in KINDS if each.name in _KINDS):
        policy.merging = kind.merging
        step = engine.begin([kind.adapters[row % len(kind.adapters)] for row in range(batch)])
        for _ in range(4):
            step()
        found[f"decode, {kind.name}, batch {batch}"] = profiled(context, step)._asdict()
        engine.keep(0)
        adapters = kind.adapters[:2] if kind.name == "mixed" else kind.adapters[:1]
        found[f"prefill, {kind.name}, {prefill} tokens"] = profiled(
            context, functools.partial(engine.prefill, adapters, prefill)
        )._asdict()
        context.keep({"profiles": found})
    decode = found[f"decode, merged, batch {batch}"]
    kernel = decode["top"][0]
    return {
        "summary": f"merged decode: {decode['launches']} launches, {1e3 * decode['busy_s']:.2f} ms busy, most in "
        f"{kernel['name'][:60]} ({kernel['us'] / 1e3:.2f} ms)",
        "profiles": found,
        "reserved_gib": memory_gib(context),
    }


class Profile(NamedTuple):
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
