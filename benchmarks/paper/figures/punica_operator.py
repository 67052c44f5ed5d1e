"""Punica's figures of the operator: roofline, implementations, and ranks, in four popularity patterns (7.1)."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from atmm.tuning.search import Shape
from benchmarks.paper import drawing
from benchmarks.paper.figure import Code, Found, Panel
from benchmarks.paper.measured.operators import BGMV, GATHER, LOOP, MBGMM, OURS, SGMV, medians, operator_seconds
from benchmarks.paper.measuring import Measuring, Setting
from vlora.bench.plots import COLORS
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


def _roofline_panels(found: Found) -> list[Panel]:
    return [functools.partial(_draw_roofline, found)]


def _draw_roofline(found: Found, axis: Any) -> None:
    intensities = []
    for place, pattern in enumerate(PATTERNS):
        points = []
        for batch, adapters, us in zip(found["batches"], found["adapters"][pattern], found["us"][pattern], strict=True):
            flop, num_bytes = _work(batch, adapters)
            points.append((flop / num_bytes, flop / us[OURS] / 1e3))
        axis.plot(*zip(*points, strict=True), "o-", color=COLORS[place], label=pattern, markersize=4)
        intensities += [x for x, _ in points]
    across = [min(intensities) / 1.5, max(intensities) * 3]
    axis.plot(across, [found["bytes/s"] * x / 1e9 for x in across], "k:", label="memory, as measured")
    axis.axhline(found["FLOP/s"] / 1e9, color="k", linestyle="--", linewidth=1, label="a large product, as measured")
    axis.set(xscale="log", yscale="log", xlabel="arithmetic intensity, FLOP per byte", ylabel="GFLOP/s")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)


def _by_pattern(found: Found, curves: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Panel]:
    labels = {"xlabel": "batch", "ylabel": "µs"}
    return [
        drawing.lines(curves[pattern], found["batches"], ticked=True, log=True, legend=6, title=pattern, **labels)
        for pattern in PATTERNS
    ]


def _implementation_panels(found: Found) -> list[Panel]:
    curves = {}
    for pattern, rows in found["us"].items():
        common = [name for name in rows[0] if all(name in row for row in rows)]
        curves[pattern] = {name: [row[name] for row in rows] for name in common}
    return _by_pattern(found, curves)


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


def _rank_panels(found: Found) -> list[Panel]:
    own = found["by rank"]
    return _by_pattern(
        found, {pattern: {f"rank {rank}": own[pattern][rank] for rank in own[pattern]} for pattern in own}
    )


def _ranks_here(found: Found) -> dict[str, float | None]:
    return {f"rank {rank}": us[-1] / us[0] for rank, us in found["by rank"]["distinct"].items()}


CODE = {
    "punica:fig7": Code(_shared, _roofline_panels),
    "punica:fig8": Code(_shared, _implementation_panels, _growth, _implementation_goals),
    "punica:fig9": Code(_shared, _rank_panels, _ranks_here),
}
