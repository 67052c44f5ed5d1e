"""The kernels of a decode step and of a prefill step of a 7B model, by their share of the device's time."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.gpu.profiling import memory_gib, profiled
from benchmarks.gpu.step import KINDS
from vlora.bench.gpu import models
from vlora.bench.gpu.context import Context
from vlora.bench.timed_engine import FixedModePolicy

_BATCH, _PROMPT, _PREFILL = 16, 1024, 2048
_SMALL_BATCH, _SMALL_PROMPT, _SMALL_PREFILL = 4, 16, 32
_KINDS = ("merged", "unmerged 8 x r16", "mixed")


def run(context: Context) -> dict[str, Any]:
    """Profile a decode step of each mode, and a step with one prompt in each mode."""
    batch, prompt, prefill = (
        (_BATCH, _PROMPT, _PREFILL) if context.on_gpu else (_SMALL_BATCH, _SMALL_PROMPT, _SMALL_PREFILL)
    )
    model = models.built(context)
    policy = FixedModePolicy()
    found: dict[str, Any] = {}
    with models.adapter_folders(model, {16: 8}) as folders:
        engine = models.timed_engine(context, model, folders, policy, prompt=prompt, batch=batch)
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
