"""Decode steps of a 7B model in every mode, against the time to read the same bytes.

Steps are timed by the host from one call to the next, as a server runs them: on a GPU the host prepares a step while
the device computes the one before. The host's share of a step is the time of a call that finds the step before it
complete and does not wait for its own. Every mode runs on one engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from vlora.bench.engine.fixed_mode import FixedModePolicy
from vlora.bench.gpu import models
from vlora.bench.gpu.context import Context
from vlora.bench.gpu.profiling import memory_gib, profiled
from vlora.bench.gpu.timing import copy_speed, launch_seconds, loop_seconds
from vlora.bench.report import Goal

_BATCHES, _PROMPT = (32, 16, 8, 1), 1024
_SMALL_BATCHES, _SMALL_PROMPT = (4, 1), 16
_PROFILED = 16
_WARMUP = 5  # steps; a set of adapters is packed after it has recurred a few times
_GOAL_BATCH = 16


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
_HOST_BATCH, _HOST_MS = 32, 1.0
_TO_MERGED = {"unmerged 8 x r16": 1.12, "unmerged 16 x r64": 1.55, "mixed": 1.15}


def run(context: Context) -> dict[str, Any]:
    """Time every kind with every batch size, from large to small batches."""
    model = models.built(context)
    sizes = models.sizes_of(model)
    bytes_per_s = copy_speed(context)
    batches, prompt = (_BATCHES, _PROMPT) if context.on_gpu else (_SMALL_BATCHES, _SMALL_PROMPT)
    policy = FixedModePolicy()
    rows: list[dict[str, Any]] = []
    with models.adapter_folders(model, {16: 8, 64: 16}) as folders:
        engine = models.timed_engine(context, model, folders, policy, prompt=prompt, batch=batches[0])
    for kind in KINDS:
        policy.merging = kind.merging
        step = engine.begin([kind.adapters[row % len(kind.adapters)] for row in range(batches[0])])
        for batch in batches:
            engine.keep(batch)
            used = {kind.adapters[row % len(kind.adapters)] for row in range(batch)}
            if kind.name == "mixed" and len(used) == 1:
                continue  # a merged batch
            seconds = loop_seconds(context, step, _WARMUP)
            adapter_bytes = 0 if kind.name in ("none", "merged") else _rank_sum(used) * sizes.adapter_rank
            num_bytes = sizes.weights + batch * prompt * sizes.kv_token + adapter_bytes
            row = {
                "kind": kind.name,
                "batch": batch,
                "context": prompt,
                "ms": 1e3 * statistics.median(seconds),
                "slowest ms": 1e3 * max(seconds),
                "bytes ms": 1e3 * num_bytes / bytes_per_s,
                "ratio": statistics.median(seconds) / (num_bytes / bytes_per_s),
            }
            if context.on_gpu:
                row["host ms"] = 1e3 * statistics.median(launch_seconds(context, step))
            if batch in (_PROFILED, batches[-1]):
                found = profiled(context, step)
                row |= {
                    "launches": found.launches,
                    "copies": found.copies,
                    "idle": 1 - found.busy_s / statistics.median(seconds),
                }
            rows.append(row)
            context.keep({"rows": rows, "copy_bytes_per_s": bytes_per_s})
    goals = _goals(rows) if context.on_gpu else []
    shown = _GOAL_BATCH if context.on_gpu else batches[0]
    merged = next(row for row in rows if (row["kind"], row["batch"]) == ("merged", shown))
    return {
        "summary": f"merged, batch {merged['batch']}: {merged['ms']:.2f} ms, {merged['ratio']:.2f} x bytes",
        "rows": rows,
        "goals": goals,
        "copy_bytes_per_s": bytes_per_s,
        "sizes": sizes._asdict(),
        "reserved_gib": memory_gib(context),
    }


def _rank_sum(adapters: set[str | None]) -> int:
    """The sum of the ranks in names such as r16-0."""
    return sum(int(name[1:].partition("-")[0]) for name in adapters if name is not None)


def _goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    at = {row["kind"]: row for row in rows if row["batch"] == _GOAL_BATCH}
    goals = [Goal(f"merged step / bytes, batch {_GOAL_BATCH}", at["merged"]["ratio"], 1.35, True)]
    for kind, limit in _TO_MERGED.items():
        ratio = at[kind]["ms"] / at["merged"]["ms"]
        goals.append(Goal(f"{kind} / merged, batch {_GOAL_BATCH}", ratio, limit, True))
    host_ms = max(row["host ms"] for row in rows if row["batch"] == _HOST_BATCH)
    goals.append(Goal(f"host ms of a step, batch {_HOST_BATCH}, any mode", host_ms, _HOST_MS, True))
    return goals
