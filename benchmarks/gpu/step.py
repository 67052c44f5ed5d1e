"""Decode steps of a 7B model in every mode, as CUDA graphs and without them, against the time to read the same bytes.

Steps are timed by the host from one call to the next, as a server runs them: on a GPU the host prepares a step while
the device computes the one before. The host's share of a step is the time of a call that finds the step before it
complete and does not wait for its own. Every mode runs on one engine; others have weights in eight and four bits.
"""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from atmm import formats
from benchmarks.gpu.profile import KINDS, memory_gib, profiled
from vlora.bench.dummy import language_shapes
from vlora.bench.gpu import models
from vlora.bench.gpu.context import Context, launch_seconds, loop_seconds, memory_speed
from vlora.bench.report import Goal
from vlora.bench.step import DecodeWork
from vlora.bench.timed_engine import FixedModePolicy, Kind, Step
from vlora.config import Quantize

BATCHES, PROMPT = (32, 16, 8, 1), 1024
_SMALL_BATCHES, _SMALL_PROMPT = (4, 1), 16
_PROFILED = 16
_WARMUP = 5  # steps; a set of adapters is packed after it has recurred a few times
_GOAL_BATCH, _CAPTURE_S = 16, 15.0


_HOST_BATCH, _HOST_MS = 32, 1.0
_TO_BYTES = 1.2
_TO_MERGED = {"unmerged 8 x r16": 1.06, "unmerged 16 x r64": 1.25, "mixed": 1.1}
_MOST_MS = {"H200": {"fp8": 3.1, "int4": 2.4}}
"""By GPU and format of the weights, of a merged step."""


def run(context: Context) -> dict[str, Any]:
    """Time every kind with every batch size, from large to small batches, and some with eight-bit weights.

    Graphs are timed first, then kernels that are launched one by one.
    """
    bytes_per_s = memory_speed(context)
    batches, prompt = (BATCHES, PROMPT) if context.on_gpu else (_SMALL_BATCHES, _SMALL_PROMPT)
    rows: list[dict[str, Any]] = []
    timed = functools.partial(_time, context, rows, prompt, bytes_per_s)
    capture_s = timed("none", KINDS, batches)
    gc.collect()
    on_cuda = context.device.type == "cuda"
    if on_cuda:
        torch.cuda.empty_cache()
    if not on_cuda or torch.cuda.get_device_capability(context.device) >= formats.FP8_CAPABILITY:
        timed("fp8", KINDS[:3], batches[-3:])
        gc.collect()
    timed("int4", KINDS[1:3], batches[-3:])
    goals = goals_of(rows, capture_s, context.gpu) if context.on_gpu else []
    shown = _GOAL_BATCH if context.on_gpu else batches[0]
    return {
        "summary": "; ".join(
            f"{row['kind']}{', graph' * row['graph']}, batch {shown}: {row['ms']:.2f} ms, {row['ratio']:.2f} x bytes"
            for row in rows
            if row["kind"].startswith("merged") and row["batch"] == shown
        ),
        "rows": rows,
        "goals": goals,
        "bytes_per_s": bytes_per_s,
        "capture_s": capture_s,
        "reserved_gib": memory_gib(context),
    }


def _time(
    context: Context,
    rows: list[dict[str, Any]],
    prompt: int,
    bytes_per_s: float,
    quantize: Quantize,
    kinds: Sequence[Kind],
    batches: Sequence[int],
) -> float | None:
    """Add the rows of weights in a format. Returns the seconds of the capture of graphs, if there are graphs."""
    model = models.built(context)
    shapes = language_shapes(model)
    policy = FixedModePolicy()
    engine = models.timed_engine(
        context,
        model,
        {16: 8, 64: 16},
        parts={"policy": policy},
        context=prompt,
        max_batch_size=batches[0],
        max_step_tokens=4096,
        quantize=quantize,
    )
    slab_bytes = engine.engine.parts.device.slabs.num_bytes
    work = DecodeWork(model, shapes, prompt, slab_bytes + model.get_output_embeddings().weight.nbytes)
    suffix = "" if quantize == "none" else f", {quantize}"
    runner = engine.engine.parts.device.runner
    captured = runner.graphs
    for kind in kinds:
        policy.merging = kind.merging
        step = engine.begin([kind.adapters[row % len(kind.adapters)] for row in range(batches[0])])
        for batch in batches:
            engine.keep(batch)
            used = {kind.adapters[row % len(kind.adapters)] for row in range(batch)}
            if kind.name == "mixed" and len(used) == 1:
                continue  # a merged batch
            ranks = [int(name[1:].partition("-")[0]) for name in used if name is not None]  # of names such as r16-0
            num_bytes = work(batch, () if kind.name in ("none", "merged") else ranks).num_bytes
            for graphs in (None,) if captured is None else (captured, None):
                runner.graphs = graphs
                row = {"kind": kind.name + suffix, "batch": batch, "context": prompt, "graph": graphs is not None}
                profiling = batch in (_PROFILED, batches[-1])
                rows.append(row | _timed(context, step, num_bytes / bytes_per_s, profiling))
                context.keep({"rows": rows, "bytes_per_s": bytes_per_s})
            runner.graphs = captured
    return None if captured is None else captured.seconds


def _timed(context: Context, step: Step, floor_s: float, profiling: bool) -> dict[str, float]:
    """Times of a step, and its kernels if profiling is set. floor_s: the time to read its bytes."""
    seconds = loop_seconds(context, step, _WARMUP)
    median = statistics.median(seconds)
    times = {
        "ms": 1e3 * median,
        "slowest ms": 1e3 * max(seconds),
        "bytes ms": 1e3 * floor_s,
        "ratio": median / floor_s,
    }
    if context.on_gpu:
        times["host ms"] = 1e3 * statistics.median(launch_seconds(context, step))
    if not profiling:
        return times
    found = profiled(context, step)
    return times | {"launches": found.launches, "copies": found.copies, "idle": 1 - found.busy_s / median}


def goals_of(rows: Sequence[dict[str, Any]], capture_s: float | None, gpu: str) -> list[Goal]:
    """The goals of the rows of a 7B model on a GPU."""
    captured = capture_s is not None
    rows = [row for row in rows if row["graph"] == captured]
    at = {row["kind"]: row for row in rows if row["batch"] == _GOAL_BATCH}
    goals = [Goal("steps run as CUDA graphs", float(captured), 1.0, False)]
    if capture_s is not None:
        goals.append(Goal("capture of the CUDA graphs, s", capture_s, _CAPTURE_S, True))
    goals.append(Goal(f"merged step / bytes, batch {_GOAL_BATCH}", at["merged"]["ratio"], _TO_BYTES, True))
    for name, most_ms in _MOST_MS.get(gpu, {}).items():
        if (row := at.get(f"merged, {name}")) is not None:
            goals.append(Goal(f"merged step in {name}, ms, batch {_GOAL_BATCH}", row["ms"], most_ms, True))
    for kind, limit in _TO_MERGED.items():
        ratio = at[kind]["ms"] / at["merged"]["ms"]
        goals.append(Goal(f"{kind} / merged, batch {_GOAL_BATCH}", ratio, limit, True))
    host_ms = max(row["host ms"] for row in rows if row["batch"] == _HOST_BATCH)
    goals.append(Goal(f"host ms of a step, batch {_HOST_BATCH}, any mode", host_ms, _HOST_MS, True))
    return goals
