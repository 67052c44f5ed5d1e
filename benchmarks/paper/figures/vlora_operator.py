"""V-LoRA's figures of the operator: extra latency of unmerged inference, tilings, latency and its stability."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from typing import Any

import torch

import atmm
from atmm.segments import SegmentPlan
from atmm.tuning.cold_cache import DeviceCaches, factors_of
from atmm.tuning.search import Case, Shape
from benchmarks.atmm import with_cold_caches
from benchmarks.paper import drawing
from benchmarks.paper.figure import Code, Found, Panel
from benchmarks.paper.measured.engine_steps import adapter_folders, engine_in_mode
from benchmarks.paper.measured.operators import (
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
from benchmarks.paper.measuring import LIMIT_S, RANK, Measuring, Setting
from vlora.bench.report import Goal
from vlora.bench.timing import by_turns, interleaved, median_ms, work_seconds
from vlora.models.loading import dummy_model

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


def _extra_panels(found: Found) -> list[Panel]:
    rows = found["rows"]
    series = {"base model, merged": [row["merged ms"] for row in rows]}
    series |= {f"extra, {name}": [row["extra ms"][name] for row in rows] for name in rows[0]["extra ms"]}
    groups = [f"{row['requests']} x {row['tokens']}" for row in rows]
    labels = {"xlabel": "requests x tokens of a prompt", "ylabel": "ms of a prefill"}
    return [drawing.bars(groups, series, log=1, legend={"fontsize": 7}, **labels)]


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


def _latency_panels(found: Found) -> list[Panel]:
    panels = []
    for even, title in ((True, "four equal segments"), (False, "four uneven segments")):
        cells = [cell for cell in found["cells"] if cell["even"] == even]
        by_cell = [medians(cell["seconds"]) for cell in cells]
        curves = {name: [1e6 * taken[name] if name in taken else None for taken in by_cell] for name in by_cell[0]}
        tokens = [cell["tokens"] for cell in cells]
        panels.append(
            drawing.lines(curves, tokens, ticked=True, log=True, legend=6.5, title=title, xlabel="tokens", ylabel="µs")
        )
    return panels


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


def _stability_panels(found: Found) -> list[Panel]:
    spread = _spreads(found)
    series = {
        "average": [1.0 for _ in spread],
        "90th percentile": [values[1] / values[0] for values in spread.values()],
        "95th percentile": [values[2] / values[0] for values in spread.values()],
    }
    label = "relative to the average of the same operator"
    return [drawing.bars([*map(drawing.wrapped, spread)], series, ylabel=label, ylim=(0.9, None))]


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
    return {name: 1e3 * value for name, value in medians(by_turns(calls, rounds, shuffled=True)).items()}


def _tile_panels(found: Found) -> list[Panel]:
    """Thread-block tiles of each configuration on the output of both inputs, and the strategies here."""
    panels: list[Panel] = []
    for line, (which, *configs) in enumerate((("Input 2", "Punica", "Config 2"), ("Input 1", "Config 1", "Config 2"))):
        panels += [functools.partial(_draw_tiles, which, config, line) for config in configs]
        panels.append(functools.partial(_draw_strategies, found, which))
    return panels


def _draw_tiles(which: str, config: str, color: int, axis: Any) -> None:
    tokens, _, rank = _INPUTS[which]
    tile_m, tile_n = _CONFIGS[config][0], _CONFIGS[config][2]
    rows, columns = math.ceil(tokens / tile_m), math.ceil(rank / tile_n)
    shown = min(rows, 256 // tile_m)  # the same rows for both, so that the tiles compare
    for row, column in itertools.product(range(shown), range(columns)):
        axis.add_patch(drawing.rectangle(column * tile_n, row * tile_m, tile_n, tile_m, color))
    axis.set(xlim=(0, max(64, rank)), ylim=(256, 0))
    axis.set_title(f"{which}, {config}: {rows * columns} blocks of {tile_m} x {tile_n}", fontsize=8)
    axis.set_xlabel(f"outputs ({rank})", fontsize=7)
    axis.set_ylabel(f"rows (256 of {tokens})", fontsize=7)
    axis.tick_params(labelsize=6)


def _draw_strategies(found: Found, which: str, axis: Any) -> None:
    ms = found["ms"][which]
    best, names = min(ms.values()), sorted(ms, key=ms.__getitem__)
    labels = [f"{ms[name]:.2f} ms" for name in names]
    tokens, (_, width, rank) = found["tokens"][which], _INPUTS[which]
    drawing.horizontal_bars(axis, {name: ms[name] / best for name in names}, labels, [drawing.HERE])
    axis.set_title(f"{which} here: {tokens} x {width}, rank {rank}", fontsize=9)
    axis.set(xlabel="x the best strategy's time", xlim=(0, 1.25 * max(ms.values()) / best))


def _table_1_panels(found: Found) -> list[Panel]:
    both = [name for name in found["ms"]["Input 1"] if name in found["ms"]["Input 2"]]
    best = {which: min(found["ms"][which].values()) for which in _HERE}
    return [
        drawing.bars(
            list(_INPUTS),
            {config: [_TABLE_1[config, which] for which in _INPUTS] for config in _CONFIGS},
            title="the paper: three tilings on an A100",
            ylabel="ms",
        ),
        drawing.bars(
            [f"{which}: {found['tokens'][which]} tokens" for which in _HERE],
            {name: [found["ms"][which][name] / best[which] for which in _HERE] for name in both},
            log=4,
            legend={"fontsize": 7, "ncols": 3, "loc": "upper left"},
            title="here: the operator's strategies",
            ylabel="x the best strategy's time",
        ),
    ]


def _tilings_here(found: Found) -> dict[str, float | None]:
    ms = found["ms"]
    return {f"slowest / fastest, {which}": max(ms[which].values()) / min(ms[which].values()) for which in _INPUTS}


CODE = {
    "v-lora:fig6": Code(_measure_extra, _extra_panels, _extra_here),
    "v-lora:fig12": Code(_shared_tilings, _tile_panels),
    "v-lora:fig17": Code(_shared_cells, _latency_panels, _latency_here, _latency_goals),
    "v-lora:fig18": Code(_shared_cells, _stability_panels, _stability_here),
    "v-lora:table1": Code(_shared_tilings, _table_1_panels, _tilings_here),
}
