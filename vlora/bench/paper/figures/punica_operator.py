"""Punica's figures of the operator: roofline, implementations, and ranks, in four popularity patterns (7.1)."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from atmm.tuning.search import Shape
from vlora.bench.paper import drawing
from vlora.bench.paper.figure import Fact, Figure, Found
from vlora.bench.paper.measured.operators import BGMV, GATHER, LOOP, MBGMM, OURS, SGMV, medians, operator_seconds
from vlora.bench.paper.measuring import BASELINE_TYPE, Measuring, Setting
from vlora.bench.report import Goal
from vlora.bench.timing import interleaved, work_seconds
from vlora.simulator.popularity import punica
from vlora.simulator.workloads import PATTERNS

_WIDTH = 4096
_RANK = 16
_RANKS = (8, 16, 32, 64)
_BYTES = 2  # of a value


def segments(pattern: str, batch: int) -> list[int]:
    """Requests of each adapter in a batch: the shares of the pattern, rounded, with at least one each."""
    shares = punica(pattern, batch)
    if shares is None:
        return [1] * batch
    drawn = random.Random(0).choices(range(len(shares)), shares, k=batch) if pattern == "skewed" else None
    if drawn is not None:
        return sorted((drawn.count(which) for which in set(drawn)), reverse=True)
    count = len(shares)
    return [batch // count + (place < batch % count) for place in range(min(count, batch))]


def _batches(setting: Setting) -> tuple[int, ...]:
    return (1, 8, 64) if setting.quick else (1, 2, 4, 8, 16, 32, 64)


def _shared(measuring: Measuring) -> dict[str, Any]:
    found: dict[str, Any] = measuring.once("punica-operators", lambda: _measure(measuring.setting))
    return found


def _measure(setting: Setting) -> dict[str, Any]:
    """Microseconds by pattern, batch and implementation at rank 16; of this operator at all ranks."""
    shape = Shape(_WIDTH, (_WIDTH,))
    batches = _batches(setting)
    us: dict[str, list[dict[str, float]]] = {pattern: [] for pattern in PATTERNS}
    by_rank: dict[str, dict[str, list[float]]] = {pattern: {} for pattern in PATTERNS}
    for pattern in PATTERNS:
        for batch in batches:
            own = segments(pattern, batch)
            taken = medians(
                operator_seconds(setting, shape, _RANK, own, 3 * setting.rounds, (LOOP, GATHER, SGMV, BGMV, MBGMM))
            )
            us[pattern].append({name: 1e6 * value for name, value in taken.items()})
            for rank in _RANKS:
                alone = medians(operator_seconds(setting, shape, rank, own, 3 * setting.rounds, (OURS,)))
                by_rank[pattern].setdefault(str(rank), []).append(1e6 * alone[OURS])
    lanes = {pattern: [len(segments(pattern, batch)) for batch in batches] for pattern in PATTERNS}
    return {"batches": list(batches), "us": us, "by rank": by_rank, "adapters": lanes, **_roof(setting)}


def _roof(setting: Setting) -> dict[str, float]:
    """Bytes read per second, and floating-point operations per second of a large product, of one thread or a GPU."""
    size = 2048 if setting.device.type == "cuda" else 768
    values = torch.ones(2**28 // 4, device=setting.device)
    left = torch.randn(size, size, device=setting.device, dtype=getattr(torch, setting.baseline_dtype))
    seconds = interleaved({"read": values.sum, "product": lambda: left @ left}, 5, clock=work_seconds(setting.device))
    return {
        "bytes/s": values.nbytes / statistics.median(seconds["read"]),
        "FLOP/s": 2 * size**3 / statistics.median(seconds["product"]),
    }


def _work(batch: int, adapters: int) -> tuple[float, float]:
    """FLOP and bytes of both products (Punica 7.1, for shrink and expand together)."""
    flop = 2 * 2 * batch * _WIDTH * _RANK
    return flop, 2 * _BYTES * (batch * (_WIDTH + _RANK) + adapters * _WIDTH * _RANK)


def _draw_roofline(found: Found, canvas: Any) -> None:
    (axis,) = drawing.panels(canvas, 1)
    lowest, highest = math.inf, 0.0
    for place, pattern in enumerate(PATTERNS):
        points = []
        for batch, adapters, us in zip(found["batches"], found["adapters"][pattern], found["us"][pattern], strict=True):
            flop, num_bytes = _work(batch, adapters)
            points.append((flop / num_bytes, flop / us[OURS] / 1e3))
        axis.plot(*zip(*points, strict=True), "o-", color=drawing.LINES[place], label=pattern, markersize=4)
        lowest, highest = min(lowest, *(x for x, _ in points)), max(highest, *(x for x, _ in points))
    across = [lowest / 1.5, highest * 3]
    axis.plot(across, [found["bytes/s"] * x / 1e9 for x in across], "k:", label="memory, as measured")
    axis.axhline(found["FLOP/s"] / 1e9, color="k", linestyle="--", linewidth=1, label="a large product, as measured")
    axis.set(xscale="log", yscale="log", xlabel="arithmetic intensity, FLOP per byte", ylabel="GFLOP/s")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)


def _draw_implementations(found: Found, canvas: Any) -> None:
    axes = drawing.panels(canvas, len(PATTERNS) + 1)
    for axis, pattern in zip(axes, PATTERNS, strict=False):
        by_batch = found["us"][pattern]
        curves = {name: [row[name] for row in by_batch] for name in by_batch[0] if all(name in row for row in by_batch)}
        drawing.lines(axis, curves, found["batches"], title=pattern, xlabel="batch", ylabel="µs")
        drawing.ticks(axis, found["batches"])
        drawing.log_values(axis)
        axis.legend(fontsize=6)
    drawing.beside(axes[-1], _SGMV_FACTS, _growth(found), ylabel="latency at batch 64 / at batch 1")


_SGMV_FACTS = tuple(
    Fact(pattern, value / 37, "x", f"7.1: from 37 µs to {value} µs with batch 1 to 64")
    for pattern, value in (("distinct", 116), ("uniform", 46), ("skewed", 46), ("identical", 40))
)


def _growth(found: Found) -> dict[str, float | None]:
    return {pattern: rows[-1][OURS] / rows[0][OURS] for pattern, rows in found["us"].items()}


def _implementation_goals(found: Found) -> list[Goal]:
    last = {pattern: rows[-1] for pattern, rows in found["us"].items()}
    return [
        Goal(f"punica fig8: {name} / {OURS}, {pattern}, batch 64", row[name] / row[OURS], 1.0, False)
        for pattern, row in last.items()
        for name in (LOOP, GATHER)
        if name in row and pattern == "distinct"
    ]


def _draw_ranks(found: Found, canvas: Any) -> None:
    axes = drawing.panels(canvas, len(PATTERNS) + 1)
    for axis, pattern in zip(axes, PATTERNS, strict=False):
        curves: Mapping[str, Sequence[float]] = {f"rank {rank}": us for rank, us in found["by rank"][pattern].items()}
        drawing.lines(axis, curves, found["batches"], title=pattern, xlabel="batch", ylabel="µs")
        drawing.ticks(axis, found["batches"])
        drawing.log_values(axis)
        axis.legend(fontsize=6)
    drawing.beside(axes[-1], _RANK_FACTS, _ranks_here(found), ylabel="distinct: batch 64 / batch 1")


_RANK_FACTS = tuple(
    Fact(f"rank {rank}", value / 42, "x", f"7.1: 42 µs for one request, {value} µs for 64 distinct ones")
    for rank, value in zip(_RANKS, (72, 75, 89, 118), strict=True)
)


def _ranks_here(found: Found) -> dict[str, float | None]:
    return {f"rank {rank}": us[-1] / us[0] for rank, us in found["by rank"]["distinct"].items()}


_OPERATOR = "One site of 4096 x 4096, bfloat16, rank 16 unless stated, factors in memory, both products."

FIGURES: Sequence[Figure] = (
    Figure(
        paper="punica",
        number="fig7",
        title="roofline of the operator",
        states="Distinct adapters keep the arithmetic intensity; identical ones follow the memory bandwidth upwards.",
        caption=f"{_OPERATOR} FLOP and bytes by Punica's formulas for shrink and expand together; the roof is "
        "measured: "
        "a sum over 256 MiB and a product of square matrices, in float32 where bfloat16 products are slow.",
        model="one layer of random values",
        measure=_shared,
        draw=_draw_roofline,
        size=(8.5, 5.0),
    ),
    Figure(
        paper="punica",
        number="fig8",
        title="implementations of the operator",
        states="SGMV is far faster than a loop and than gather-and-bmm, and its latency grows little with the batch.",
        caption=f"{_OPERATOR} Here: this project's operator in the place of SGMV, Punica's two baselines. "
        f"{BASELINE_TYPE} A CPU computes one product after the other, so time grows with the batch where a GPU's does "
        "not.",
        model="one layer of random values",
        measure=_shared,
        draw=_draw_implementations,
        facts=_SGMV_FACTS,
        here=_growth,
        goals=_implementation_goals,
        size=(18.0, 4.2),
    ),
    Figure(
        paper="punica",
        number="fig9",
        title="ranks of the operator",
        states="With distinct adapters latency grows from 42 µs to 72-118 µs by rank; with shared ones it stays the "
        "same.",
        caption=f"{_OPERATOR} This project's operator.",
        model="one layer of random values",
        measure=_shared,
        draw=_draw_ranks,
        facts=_RANK_FACTS,
        here=_ranks_here,
        size=(18.0, 4.2),
    ),
)
