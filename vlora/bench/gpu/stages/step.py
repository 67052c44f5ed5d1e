"""Decode steps of a 7B model in every mode, as CUDA graphs and without them, against the time to read the same bytes.

Steps are timed by the host from one scheduling to the next, as a server runs them. Every mode runs on one engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from vlora.bench.engine.fixed_mode import FixedModePolicy
from vlora.bench.engine.timed_engine import Step
from vlora.bench.gpu import models
from vlora.bench.gpu.context import Context
from vlora.bench.gpu.profiling import memory_gib, profiled
from vlora.bench.gpu.timing import copy_speed, host_seconds
from vlora.bench.report import Goal

_BATCHES, _PROMPT = (32, 16, 8, 1), 1024
_SMALL_BATCHES, _SMALL_PROMPT = (4, 1), 16
_PROFILED = 16
_WARMUP = 5  # steps; a set of adapters is packed after it has recurred a few times
_GOAL_BATCH, _CAPTURE_S = 16, 15.0


class Kind(NamedTuple):
    """One kind of batch: the adapters of its requests by turns, and whether the first one is merged."""

    name: str
    adapters: Sequence[str | None]
    merging: bool


KINDS = (
    Kind("none", (None,), False),
    Kind("merged", ("r16-0",), True),
    Kind("unmerged 8 x r16", tuple(f"r16-{index}" for index in range(8)), False),
    Kind("unmerged 16 x r64", tuple(f"r64-{index}" for index in range(16)), False),
    # Every second request uses the merged adapter.
    Kind("mixed", tuple(f"r16-{index // 2 + 1 if index % 2 else 0}" for index in range(14)), True),
)
_TO_MERGED = {"unmerged 8 x r16": 1.12, "unmerged 16 x r64": 1.55, "mixed": 1.15}


def run(context: Context) -> dict[str, Any]:
    """Time every kind with every batch size, from large to small batches; graphs first, then launches one by one."""
    model = models.built(context)
    sizes = models.sizes_of(model)
    bytes_per_s = copy_speed(context)
    batches, prompt = (_BATCHES, _PROMPT) if context.on_gpu else (_SMALL_BATCHES, _SMALL_PROMPT)
    policy = FixedModePolicy()
    rows: list[dict[str, Any]] = []
    with models.adapter_folders(model, {16: 8, 64: 16}) as folders:
        engine = models.timed_engine(context, model, folders, policy, prompt=prompt, batch=batches[0])
    runner = engine.engine.parts.device.runner
    captured = runner.graphs
    for kind in KINDS:
        policy.merging = kind.merging
        step = engine.begin([kind.adapters[row % len(kind.adapters)] for row in range(batches[0])])
        for batch in batches:
            engine.keep(batch)
            used = {kind.adapters[row % len(kind.adapters)] for row in range(batch)}
            if kind.name == "mixed" and len(used) == 1:
                continue  # a merged batch
            adapter_bytes = 0 if kind.name in ("none", "merged") else _rank_sum(used) * sizes.adapter_rank
            num_bytes = sizes.weights + batch * prompt * sizes.kv_token + adapter_bytes
            for graphs in (None,) if captured is None else (captured, None):
                runner.graphs = graphs
                row = {"kind": kind.name, "batch": batch, "context": prompt, "graph": graphs is not None}
                rows.append(row | _timed(context, step, num_bytes / bytes_per_s, batch in (_PROFILED, batches[-1])))
                context.keep({"rows": rows, "copy_bytes_per_s": bytes_per_s})
            runner.graphs = captured
    goals = _goals(rows, None if captured is None else captured.seconds) if context.on_gpu else []
    shown = _GOAL_BATCH if context.on_gpu else batches[0]
    merged = next(row for row in rows if (row["kind"], row["batch"]) == ("merged", shown))
    return {
        "summary": f"merged, batch {merged['batch']}: {merged['ms']:.2f} ms, {merged['ratio']:.2f} x bytes",
        "rows": rows,
        "goals": goals,
        "copy_bytes_per_s": bytes_per_s,
        "sizes": sizes._asdict(),
        "capture_s": None if captured is None else captured.seconds,
        "reserved_gib": memory_gib(context),
    }


def _timed(context: Context, step: Step, floor_s: float, profiling: bool) -> dict[str, float]:
    """Times of a step, and its kernels if profiling is set. floor_s: the time to read its bytes."""
    seconds = host_seconds(context, step, _WARMUP)
    median = statistics.median(seconds)
    times = {
        "ms": 1e3 * median,
        "slowest ms": 1e3 * max(seconds),
        "bytes ms": 1e3 * floor_s,
        "ratio": median / floor_s,
    }
    if not profiling:
        return times
    found = profiled(context, step)
    return times | {"launches": found.launches, "copies": found.copies, "idle": 1 - found.busy_s / median}


def _rank_sum(adapters: set[str | None]) -> int:
    """The sum of the ranks in names such as r16-0."""
    return sum(int(name[1:].partition("-")[0]) for name in adapters if name is not None)


def _goals(rows: Sequence[dict[str, Any]], capture_s: float | None) -> list[Goal]:
    """capture_s: None if no graph was captured. Then a goal fails, and the others are those of steps without graphs."""
    captured = capture_s is not None
    at = {row["kind"]: row for row in rows if row["batch"] == _GOAL_BATCH and row["graph"] == captured}
    goals = [Goal("steps run as CUDA graphs", float(captured), 1.0, False)]
    if capture_s is not None:
        goals.append(Goal("capture of the CUDA graphs, s", capture_s, _CAPTURE_S, True))
    goals.append(Goal(f"merged step / bytes, batch {_GOAL_BATCH}", at["merged"]["ratio"], 1.35, True))
    for kind, limit in _TO_MERGED.items():
        ratio = at[kind]["ms"] / at["merged"]["ms"]
        goals.append(Goal(f"{kind} / merged, batch {_GOAL_BATCH}", ratio, limit, True))
    return goals
