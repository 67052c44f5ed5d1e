"""The operator against the tilings of other servers. On a GPU, as `vlora bench atmm` there: the quick grid, then the
rest of it, group of layers by group of layers; on a CPU without the tilings, on small shapes.

Only deltas are timed, as CUDA graphs over copies of a group that together exceed the cache, so that factors are read
from memory as in a model. Floors are bytes (factors once, inputs once, outputs twice) at the best speed of memory
in the same run.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import atmm
from atmm.dispatch import choose
from atmm.segments import BatchStats
from atmm.tuning.search import Case, Shape
from benchmarks.gpu.profile import profiled
from benchmarks.plain_baselines import lane_factors, padded_einsum
from vlora.bench.gpu.context import Context, device_seconds, device_times, memory_speed
from vlora.bench.gpu.stages.search import QWEN2_VL_7B
from vlora.bench.harness import Measured
from vlora.bench.report import Goal

MODELS = {
    "Qwen2-VL-7B": QWEN2_VL_7B,
    "LLaVA-1.5-7B": (
        Shape(4096, (4096, 4096, 4096)),
        Shape(4096, (4096,)),
        Shape(4096, (11008, 11008)),
        Shape(11008, (4096,)),
    ),
}
_RANKS = (16, 64)
_TOKENS = (1, 16, 64, 256, 1024, 4096)
_ADAPTERS = (1, 8, 32)
_NUM_LAYERS = 28
_CACHE_BYTES = 128 * 2**20  # more than the capacity of any L2 cache
MOST_COPIES = 8
_SMALL_CASES = (
    Case(Shape(64, (96,)), 8, "float32", 2, 8, True),
    Case(Shape(64, (96,)), 8, "float32", 2, 8, False),
    Case(Shape(64, (96,)), 8, "bfloat16", 4, 16, True),
)
_RESERVE_S = 25.0


def run(context: Context) -> dict[str, Any]:
    """As many cells as there is time for."""
    torch.manual_seed(0)
    if not context.on_gpu:
        with torch.inference_mode():
            rows = [measure(context, case, memory_speed(context), ()) for case in _SMALL_CASES]
        return {"summary": f"{len(rows)} cells of a CPU", "rows": rows}
    cells = list(cases(quick=True))
    cells += [cell for cell in cases(quick=False) if cell not in cells]
    rows, goals = _measured(context, cells)
    worst = min(row["vllm"] for row in rows)
    return {
        "summary": f"{len(rows)} of {len(cells)} cells; vLLM's style takes at least {worst:.2f} x as long",
        "rows": rows,
        "cells": len(cells),
        "goals": goals,
    }


def measure_all(quick: bool) -> Measured:
    """`vlora bench atmm` on a GPU; quick: one model, one rank, few batches."""
    torch.manual_seed(0)
    context = Context(torch.device("cuda"), Path(), math.inf, lambda found: None)
    rows, goals = _measured(context, list(cases(quick)))
    return Measured(rows, goals=goals)


def _measured(context: Context, cells: Sequence[tuple[str, Case]]) -> tuple[list[dict[str, Any]], list[Goal]]:
    from benchmarks.kernel_baselines import STYLES  # needs Triton

    speed = memory_speed(context)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for model, case in context.while_time(list(cells), _RESERVE_S):
            rows.append({"model": model, **measure(context, case, speed, STYLES)})
            context.keep({"rows": rows, "cells": len(cells)})
        return rows, goals_of(rows, STYLES, merge_ratio(context, speed), decode_launches(context))


def cases(quick: bool) -> Iterator[tuple[str, Case]]:
    """The cells of the report, each with its model's name."""
    models = list(MODELS.items())[: 1 if quick else None]
    for (model, shapes), rank, adapters, tokens in itertools.product(
        models, _RANKS[: 1 if quick else None], _ADAPTERS, (16, 1024) if quick else _TOKENS
    ):
        if adapters > tokens:
            continue
        for shape in shapes[:1] if quick else shapes:
            for even in (True, False) if 1 < adapters < tokens else (True,):
                yield model, Case(shape, rank, "bfloat16", adapters, tokens, even)


def measure(context: Context, case: Case, bytes_per_s: float, styles: Sequence[str]) -> dict[str, Any]:
    """One row: the operator, each style relative to it, and the byte floor."""
    device = str(context.device)
    groups = [case.group(device) for _ in range(_num_copies(case))]
    x, outputs = case.input(device)
    plan = case.plan()
    packed = groups[0].packed
    assert packed is not None
    ours = choose(BatchStats(plan, packed.layout))
    mine = case.plan(ours)
    together = torch.cat(outputs, 1)
    calls: dict[str, Callable[[], object]] = {"ours": functools.partial(_add_all, groups, mine, x, together)}
    for name in styles:
        from benchmarks.kernel_baselines import prepare_call  # needs Triton

        calls[name] = functools.partial(
            _call_all, [prepare_call(name, group, plan.lanes, x, outputs) for group in groups]
        )
    if not case.even:
        each = [
            padded_einsum(*lane_factors(site, plan), plan, x, y)
            for group in groups
            for site, y in zip(group.sites, outputs, strict=True)
        ]
        calls["einsum"] = functools.partial(_call_all, each)
    timed = {name: device_times(context, call, len(groups)) for name, call in calls.items()}
    median = {name: statistics.median(seconds) for name, seconds in timed.items()}
    elements = case.num_adapters * case.rank * sum(case.shape.d_in + d_out for d_out in case.shape.d_outs)
    elements += case.num_tokens * (case.shape.d_in + 2 * sum(case.shape.d_outs))
    row: dict[str, Any] = {
        "layer": f"{case.shape.d_in}x{'+'.join(map(str, case.shape.d_outs))}",
        "rank": case.rank,
        "tokens": case.num_tokens,
        "adapters": case.num_adapters,
        "segments": "even" if case.even else "uneven",
        "dtype": case.dtype,
        "us": median["ours"] * 1e6,
        "ours / floor": median["ours"] / (elements * x.element_size() / bytes_per_s),
        "p95 / p50": timed["ours"][int(0.95 * (len(timed["ours"]) - 1))] / median["ours"],
        "chosen": ours,
    }
    for name in (*styles, "einsum"):
        row[name] = median[name] / median["ours"] if name in median else None
    return row


def _num_copies(case: Case) -> int:
    factors = case.num_adapters * case.rank * sum(case.shape.d_in + d_out for d_out in case.shape.d_outs) * 2
    return max(1, min(MOST_COPIES, _CACHE_BYTES // factors))


def _add_all(groups: Sequence[atmm.SiteGroup], plan: atmm.SegmentPlan, x: Tensor, y: Tensor) -> None:
    """All of a group's sites in one call, as in the engine."""
    for group in groups:
        atmm.add_deltas(y, x, group, plan)


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def merge_ratio(context: Context, bytes_per_s: float) -> float:
    """Time to merge all linear layers of Qwen2-VL-7B out of place, relative to reading and writing them once."""
    seconds = floor = 0.0
    for shape in QWEN2_VL_7B:
        for d_out in shape.d_outs:
            base = torch.zeros(_NUM_LAYERS, d_out, shape.d_in, dtype=torch.bfloat16, device=context.device)
            out = torch.empty_like(base)
            a = torch.randn(_NUM_LAYERS, 16, shape.d_in, device=context.device).bfloat16()
            bt = torch.randn(_NUM_LAYERS, 16, d_out, device=context.device).bfloat16()
            call = functools.partial(atmm.merge, out, base, a, bt, 1.0)
            seconds += device_seconds(context, call)
            floor += 2 * base.numel() * base.element_size() / bytes_per_s
    return seconds / floor


def decode_launches(context: Context) -> int:
    """Number of kernels for one layer's deltas: 16 tokens of 8 adapters of rank 16."""
    count = 0
    for shape in QWEN2_VL_7B:
        case = Case(shape, 16, "bfloat16", 8, 16, True)
        group = case.group(str(context.device))
        x, outputs = case.input(str(context.device))
        found = profiled(context, functools.partial(_add_all, [group], case.plan(), x, torch.cat(outputs, 1)))
        count += found.launches + found.copies
    return count


def goals_of(rows: Sequence[dict[str, Any]], styles: Sequence[str], merging: float, launches: int) -> list[Goal]:
    def least(name: str, tokens: int = 1) -> float:
        return min(row[name] for row in rows if row[name] and row["tokens"] >= tokens)

    prefill = [row["ours / floor"] for row in rows if row["tokens"] >= 1024]
    return [
        *(
            Goal(f"{name} / ours, 256 tokens or more, worst", least(name, 256), 2.0, False)
            for name in ("sgmv", "mbgmm")
        ),
        Goal("einsum / ours, 256 tokens or more, worst", least("einsum", 256), 2.0, False),
        Goal("vllm / ours, worst", least("vllm"), 1.2, False),
        *(Goal(f"{name} / ours, worst", least(name), 1.0, False) for name in styles if name != "vllm"),
        Goal("ours / byte floor, 1,024 tokens or more, worst", max(prefill), 1.4, True),
        Goal("kernels per layer in decode", launches, 8, True),
        Goal("merge of a 7B model / byte floor", merging, 1.3, True),
    ]
