"""V-LoRA's figures of the operator: extra latency of unmerged inference, tilings, latency and its stability."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

import atmm
from atmm.segments import SegmentPlan
from atmm.tuning.cold_cache import DeviceCaches, factors_of
from atmm.tuning.search import Case, Shape
from vlora.bench.kernels.atmm import timed_rounds, with_cold_caches
from vlora.bench.paper import drawing
from vlora.bench.paper.figure import Fact, Figure, Found
from vlora.bench.paper.measured.engine_steps import adapter_folders, engine_in_mode
from vlora.bench.paper.measured.operators import (
    BGMV,
    EINSUM,
    GATHER,
    LOOP,
    MBGMM,
    OURS,
    PEFT,
    SGMV,
    lanes_of,
    mean_ratio,
    medians,
    operator_seconds,
    sites_of_a_layer,
)
from vlora.bench.paper.measuring import BASELINE_TYPE, LIMIT_S, RANK, Measuring, Setting
from vlora.bench.report import Goal
from vlora.bench.timing import interleaved, median_ms, work_seconds
from vlora.models.loading import dummy_model

_ON_CPU = "a CPU has no SGMV or MBGMM kernels: Punica's and S-LoRA's operators are timed on a GPU only"

_SITES = "single layers of random bfloat16 values"

# -- Figure 6 ---------------------------------------------------------------------------------------------------------

_OPERATORS = (EINSUM, PEFT, SGMV, MBGMM)


def _measure_extra(measuring: Measuring) -> dict[str, Any]:
    """Milliseconds of merged prefills, and what unmerged ones take in addition."""
    setting = measuring.setting
    cases = ((2, 128), (3, 256), (4, 256)) if setting.quick else ((2, 128), (3, 256), (4, 256), (4, 512), (4, 1024))
    most = max(number * tokens for number, tokens in cases)
    clock = work_seconds(setting.device)
    rows = []
    with adapter_folders(setting.model, 4) as folders:
        engines = {
            merging: engine_in_mode(setting, folders, merging=merging, context=16, longest=2, max_step_tokens=most)
            for merging in (True, False)
        }
        for number, tokens in cases:
            names = list(folders)[:number]
            calls = {
                "merged": lambda n=number, t=tokens: engines[True].prefill(["a0"] * n, n * t),
                "unmerged": lambda own=names, t=tokens: engines[False].prefill(own, len(own) * t),
            }
            seconds = interleaved(calls, setting.rounds, warmup=1, clock=clock, limit_s=LIMIT_S)
            base = median_ms(seconds["merged"])
            extra = {OURS: median_ms(seconds["unmerged"]) - base} | _operators_alone(setting, number, tokens)
            rows.append({"requests": number, "tokens": tokens, "merged ms": base, "extra ms": extra})
    return {"rows": rows}


def _operators_alone(setting: Setting, number: int, tokens: int) -> dict[str, float]:
    """Milliseconds that other operators take for all sites of the model."""
    sites, num_layers = sites_of_a_layer(dummy_model(setting.model.config(), "bfloat16", torch.device("meta"), seed=0))
    total: dict[str, float] = {}
    for shape in sites:
        taken = medians(operator_seconds(setting, shape, RANK, [tokens] * number, setting.rounds, _OPERATORS))
        for name, seconds in taken.items():
            if name != OURS:
                total[name] = total.get(name, 0.0) + 1e3 * num_layers * seconds
    return total


def _draw_extra(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2)
    rows = found["rows"]
    names = list(rows[0]["extra ms"])
    groups = [f"{row['requests']} x {row['tokens']}" for row in rows]
    series = {"base model, merged": [row["merged ms"] for row in rows]}
    series |= {f"extra, {name}": [row["extra ms"][name] for row in rows] for name in names}
    drawing.bars(left, groups, series, xlabel="requests x tokens of a prompt", ylabel="ms of a prefill")
    drawing.log_values(left)
    left.legend(fontsize=7)
    drawing.beside(right, _EXTRA_FACTS, _extra_here(found), ylabel="% of the base model's time")


_EXTRA_FACTS = (
    Fact(
        "extra of the best other operator", 40, "%", "caption of figure 6: 27-140 ms, 40-61 % of the base model's time"
    ),
    Fact(
        "extra of the worst other operator", 61, "%", "caption of figure 6: 27-140 ms, 40-61 % of the base model's time"
    ),
)


def _extra_here(found: Found) -> dict[str, float | None]:
    """Of the other operators: the paper's numbers are of dLoRA, Punica and S-LoRA, without its own operator."""
    rows = found["rows"]
    shares = [
        100 * statistics.fmean(row["extra ms"][name] / row["merged ms"] for row in rows)
        for name in rows[0]["extra ms"]
        if name != OURS
    ]
    return {"extra of the best other operator": min(shares), "extra of the worst other operator": max(shares)}


# -- Figures 17 and 18 ------------------------------------------------------------------------------------------------

_SITE = Shape(896, (4864,))
_GPU_SITE = Shape(4096, (4096,))
_ADAPTERS = 4


def _shared_cells(measuring: Measuring) -> dict[str, Any]:
    found: dict[str, Any] = measuring.once("operator-by-tokens", lambda: _measure_cells(measuring.setting))
    return found


def _measure_cells(setting: Setting) -> dict[str, Any]:
    """Seconds of every call by number of tokens: even segments of four adapters, and uneven ones."""
    on_gpu = setting.device.type == "cuda"
    tokens = (4, 16, 64, 256) if setting.quick else (4, 16, 64, 256, 1024, 2048)
    rounds = 100 if on_gpu or not setting.quick else 20
    cells = []
    for count, even in itertools.product(tokens, (True, False)):
        segments = [count // _ADAPTERS] * _ADAPTERS if even else _uneven(count)
        if not even and count == _ADAPTERS:
            continue
        own = rounds if count <= 256 else max(10, rounds // 8)
        seconds = operator_seconds(setting, _GPU_SITE if on_gpu else _SITE, RANK, segments, own)
        cells.append({"tokens": count, "even": even, "seconds": seconds})
    return {"cells": cells}


def _uneven(count: int) -> list[int]:
    """Segments each about half as long as the one before."""
    first = [max(1, round(count * share)) for share in (8 / 15, 4 / 15, 2 / 15)]
    return [*first, max(1, count - sum(first))]


def _draw_latency(found: Found, canvas: Any) -> None:
    left, middle, right = drawing.panels(canvas, 3, (1, 1, 1))
    for axis, even, title in ((left, True, "four equal segments"), (middle, False, "four uneven segments")):
        cells = [cell for cell in found["cells"] if cell["even"] == even]
        tokens = [cell["tokens"] for cell in cells]
        by_cell = [medians(cell["seconds"]) for cell in cells]
        curves = {name: [1e6 * taken[name] if name in taken else None for taken in by_cell] for name in by_cell[0]}
        drawing.lines(axis, curves, tokens, title=title, xlabel="tokens", ylabel="µs")  # type: ignore[arg-type]
        drawing.ticks(axis, tokens)
        drawing.log_values(axis)
        axis.legend(fontsize=6.5)
    drawing.beside(right, _LATENCY_FACTS, _latency_here(found), ylabel="x as long as this project's operator")


_SPEEDS = "6.3.2: ATMM speeds up 2.7x, 2.3x and 3.4x of S-LoRA, Punica and dLoRA"
_LATENCY_FACTS = (
    Fact("S-LoRA's operator", 2.7, "x", _SPEEDS),
    Fact("Punica's operator", 2.3, "x", _SPEEDS),
    Fact("dLoRA's operator", 3.4, "x", _SPEEDS),
)


def _latency_here(found: Found) -> dict[str, float | None]:
    cells = [medians(cell["seconds"]) for cell in found["cells"]]
    return {
        "S-LoRA's operator": mean_ratio(cells, MBGMM),
        "Punica's operator": mean_ratio(cells, SGMV),
        "dLoRA's operator": mean_ratio(cells, EINSUM),
    }


def _latency_goals(found: Found) -> list[Goal]:
    cells = [medians(cell["seconds"]) for cell in found["cells"]]
    known = [(name, mean_ratio(cells, name)) for name in (EINSUM, GATHER, LOOP, PEFT, SGMV, BGMV, MBGMM)]
    return [
        Goal(f"fig17: {name} / {OURS}, geometric mean", ratio, 1.0, False) for name, ratio in known if ratio is not None
    ]


def _draw_stability(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2)
    spread = _spreads(found)
    drawing.bars(
        left,
        [drawing.wrapped(name) for name in spread],
        {
            "average": [1.0 if values[0] is not None else None for values in spread.values()],
            "90th percentile": [values[1] / values[0] for values in spread.values()],
            "95th percentile": [values[2] / values[0] for values in spread.values()],
        },
        ylabel="relative to the average of the same operator",
        ylim=(0.9, None),
    )
    drawing.beside(right, _STABILITY_FACTS, _stability_here(found), ylabel="x as large a fluctuation")


def _spreads(found: Found) -> dict[str, tuple[float, float, float]]:
    """Mean, 90th and 95th percentile of all calls relative to the medians of their cells, by operator."""
    shares: dict[str, list[float]] = {}
    for cell in found["cells"]:
        for name, seconds in cell["seconds"].items():
            middle = statistics.median(seconds)
            shares.setdefault(name, []).extend(taken / middle for taken in seconds)
    spreads = {}
    for name, values in shares.items():
        cuts = statistics.quantiles(values, n=20)
        spreads[name] = statistics.fmean(values), cuts[17], cuts[18]
    return spreads


_STABLE = "6.3.2: ATMM reduces the latency fluctuation by 3x, 2x and 2x compared to S-LoRA, Punica and dLoRA"
_STABILITY_FACTS = (
    Fact("S-LoRA's operator", 3, "x", _STABLE),
    Fact("Punica's operator", 2, "x", _STABLE),
    Fact("dLoRA's operator", 2, "x", _STABLE),
)


def _stability_here(found: Found) -> dict[str, float | None]:
    """Fluctuation: the 95th percentile less the median, relative to the median."""
    spread = _spreads(found)
    own = spread[OURS][2] - 1
    return {
        f"{system}'s operator": (spread[name][2] - 1) / own if name in spread and own > 0 else None
        for system, name in (("S-LoRA", MBGMM), ("Punica", SGMV), ("dLoRA", EINSUM))
    }


# -- Figure 12 and table 1 --------------------------------------------------------------------------------------------

_CONFIGS = {
    "Punica": (16, 64, 64, 16, 16, 64),
    "Config 1": (64, 32, 32, 32, 32, 32),
    "Config 2": (64, 64, 64, 32, 64, 64),
}
_INPUTS = {"Input 1": (256, 4096, 32), "Input 2": (8192, 4096, 128)}
_DECODE = "decode"
_FEW_TOKENS = 1024
_HERE = _INPUTS | {_DECODE: (4, 4096, 32)}
_TABLE_1 = {
    ("Punica", "Input 1"): 0.087,
    ("Config 1", "Input 1"): 0.07,
    ("Config 2", "Input 1"): 0.13,
    ("Punica", "Input 2"): 0.19,
    ("Config 1", "Input 2"): 0.12,
    ("Config 2", "Input 2"): 0.10,
}


def _shared_tilings(measuring: Measuring) -> dict[str, Any]:
    found: dict[str, Any] = measuring.once("strategies", lambda: _measure_strategies(measuring.setting))
    return found


def _measure_strategies(setting: Setting) -> dict[str, Any]:
    """Milliseconds of every strategy of the operator on the two inputs of table 1: [u, 4096] x [4096, rank]."""
    ms: dict[str, dict[str, float]] = {}
    counts: dict[str, int] = {}
    for name, (tokens, width, rank) in _HERE.items():
        counts[name] = min(tokens, 1024) if setting.quick else tokens
        case = Case(Shape(width, (width,)), rank, "bfloat16", 1, counts[name], True)
        with torch.inference_mode():
            ms[name] = _strategy_ms(setting, case)
    return {"ms": ms, "tokens": counts}


def _strategy_ms(setting: Setting, case: Case) -> dict[str, float]:
    device = str(setting.device)
    group = case.group(device)
    (site,) = group.sites
    x, (y,) = case.input(device)
    names = [name for name in atmm.STRATEGIES if name != "tiled" or device == "cuda"]
    plans = {name: SegmentPlan(case.num_tokens, lanes_of([case.num_tokens]), name) for name in names}
    clock = work_seconds(setting.device)
    caches = DeviceCaches(device, x.dtype)
    calls = {
        name: with_cold_caches(functools.partial(atmm.add_delta, y, x, site, plan), caches, factors_of(group), clock)
        for name, plan in plans.items()
    }
    rounds = setting.rounds if case.num_tokens <= _FEW_TOKENS else 3  # of long calls, which vary less
    return {name: 1e3 * value for name, value in medians(timed_rounds(calls, rounds)).items()}


def _draw_tiles(found: Found, canvas: Any) -> None:
    """Thread-block tiles of each configuration on the output of both inputs, and the strategies here."""
    grid = canvas.subplots(2, 3, gridspec_kw={"width_ratios": (1.1, 1.1, 1.5)})
    pairs = (("Input 2", "Punica", "Config 2"), ("Input 1", "Config 1", "Config 2"))
    for line, (which, *configs) in enumerate(pairs):
        tokens, _, rank = _INPUTS[which]
        for axis, config in zip(grid[line], configs, strict=False):
            tile_m, tile_n = _CONFIGS[config][0], _CONFIGS[config][2]
            rows, columns = math.ceil(tokens / tile_m), math.ceil(rank / tile_n)
            shown = min(rows, 256 // tile_m)  # the same rows for both, so that the tiles compare
            for row, column in itertools.product(range(shown), range(columns)):
                axis.add_patch(drawing.rectangle(column * tile_n, row * tile_m, tile_n, tile_m, line))
            axis.set(xlim=(0, max(64, rank)), ylim=(256, 0))
            axis.set_title(f"{which}, {config}: {rows * columns} blocks of {tile_m} x {tile_n}", fontsize=8)
            axis.set_xlabel(f"outputs ({rank})", fontsize=7)
            axis.set_ylabel(f"rows (256 of {tokens})", fontsize=7)
            axis.tick_params(labelsize=6)
        _draw_strategies(found, grid[line][2], which)


def _draw_strategies(found: Found, axis: Any, which: str) -> None:
    ms = found["ms"][which]
    best = min(ms.values())
    names = sorted(ms, key=ms.__getitem__)
    drawn = axis.barh(range(len(names)), [ms[name] / best for name in names], color=drawing.HERE)
    axis.bar_label(drawn, [f"{ms[name]:.2f} ms" for name in names], fontsize=7, padding=2)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    tokens, width, rank = found["tokens"][which], _INPUTS[which][1], _INPUTS[which][2]
    axis.set_title(f"{which} here: {tokens} x {width}, rank {rank}", fontsize=9)
    axis.set_xlabel("x the best strategy's time", fontsize=8)
    axis.set_xlim(0, 1.25 * max(ms.values()) / best)


def _draw_table_1(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2)
    drawing.bars(
        left,
        list(_INPUTS),
        {config: [_TABLE_1[config, which] for which in _INPUTS] for config in _CONFIGS},
        title="the paper: three tilings on an A100",
        ylabel="ms",
    )
    both = [name for name in found["ms"]["Input 1"] if name in found["ms"]["Input 2"]]
    best = {which: min(found["ms"][which].values()) for which in _HERE}
    drawing.bars(
        right,
        [f"{which}: {found['tokens'][which]} tokens" for which in _HERE],
        {name: [found["ms"][which][name] / best[which] for which in _HERE] for name in both},
        title="here: the operator's strategies",
        ylabel="x the best strategy's time",
    )
    right.set_ylim(0.8, 4 * right.get_ylim()[1])
    drawing.log_values(right)
    right.legend(fontsize=7, ncols=3, loc="upper left")


_TABLE_1_FACTS = (
    Fact(
        "slowest / fastest, Input 1",
        0.13 / 0.07,
        "x",
        "Table 1: 0.087, 0.07 and 0.13 ms; 4.3.1: the most 1.9x latency difference",
    ),
    Fact(
        "slowest / fastest, Input 2",
        0.19 / 0.10,
        "x",
        "Table 1: 0.19, 0.12 and 0.10 ms; 4.3.1: the most 1.9x latency difference",
    ),
)


def _tilings_here(found: Found) -> dict[str, float | None]:
    ms = found["ms"]
    return {f"slowest / fastest, {which}": max(ms[which].values()) / min(ms[which].values()) for which in _INPUTS}


FIGURES: Sequence[Figure] = (
    Figure(
        paper="v-lora",
        number="fig6",
        minutes=10,
        title="extra latency of unmerged inference",
        states="Unmerged inference takes 27-140 ms more than merged inference, 40-61 % of the base model's time.",
        caption="Prompts of several requests, each with its own adapter. This project's operator in the engine, "
        f"unmerged less merged; other operators alone, summed over the model's sites ({_ON_CPU}). Beside the paper's "
        "numbers, which are of dLoRA, Punica and S-LoRA: the other operators, on a CPU a padded einsum and PEFT. "
        f"{BASELINE_TYPE}",
        measure=_measure_extra,
        draw=_draw_extra,
        facts=_EXTRA_FACTS,
        here=_extra_here,
        size=(12.0, 4.6),
    ),
    Figure(
        paper="v-lora",
        number="fig12",
        minutes=3,
        title="tilings of table 1, and the strategies here",
        states="Small tiles read memory more often on a large input; large ones leave multiprocessors idle on a small.",
        caption="Left: the paper's thread-block tiles on the output, computed from its configurations (an "
        "illustration). Right: the operator's strategies on the same inputs; with --quick Input 2 has 1,024 rows.",
        model=_SITES,
        measure=_shared_tilings,
        draw=_draw_tiles,
        size=(13.0, 6.0),
    ),
    Figure(
        paper="v-lora",
        number="fig17",
        title="latency of operators by tokens",
        states="ATMM has the lowest average latency at every number of tokens.",
        caption=f"One layer's site, four adapters, factors in memory; {_ON_CPU}. {BASELINE_TYPE}",
        model=_SITES,
        measure=_shared_cells,
        draw=_draw_latency,
        facts=_LATENCY_FACTS,
        here=_latency_here,
        goals=_latency_goals,
        size=(14.0, 4.6),
    ),
    Figure(
        paper="v-lora",
        number="fig18",
        title="stability of operators",
        states="ATMM reduces the fluctuation of latency by 3x, 2x and 2x compared to S-LoRA, Punica and dLoRA.",
        caption="The calls of figure 17, each relative to the median of its operator and number of tokens; CPU seconds "
        "of one thread vary less than a GPU's latency. Fluctuation: 95th percentile less median. "
        f"{_ON_CPU[0].upper()}{_ON_CPU[1:]}.",
        model=_SITES,
        measure=_shared_cells,
        draw=_draw_stability,
        facts=_STABILITY_FACTS,
        here=_stability_here,
        size=(12.0, 4.6),
    ),
    Figure(
        paper="v-lora",
        number="table1",
        title="adaptive tiling against static tiling",
        states="No tiling is the best for both inputs; the wrong one takes up to 1.9 times as long.",
        caption="The paper: three tilings on an A100. Here: the strategies among which the operator chooses, on the "
        "same inputs with one adapter, and on four tokens as in decoding; with --quick Input 2 has 1,024 rows.",
        model=_SITES,
        measure=_shared_tilings,
        draw=_draw_table_1,
        facts=_TABLE_1_FACTS,
        here=_tilings_here,
        size=(11.0, 4.4),
    ),
)
