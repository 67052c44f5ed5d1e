"""The operator against baselines that add many adapters' deltas, layer by layer.

Only deltas are timed. In every case the factors are as cold as in a model's layer: the base weights pass through the
caches in between.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import atmm
from atmm.dispatch import choose
from atmm.segments import BatchStats
from atmm.tuning.search import Case, Shape
from atmm.tuning.timing import DeviceCaches, factors_of, race, read_by
from benchmarks.gpu import styles
from benchmarks.plain_baselines import gather_bmm, lane_factors, padded_einsum, peft_layer, plain_loop
from benchmarks.plots import Picture, select
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal, Row
from vlora.bench.timing import by_turns

_SHAPES = (Shape(896, (4864,)), Shape(2048, (8192,)))
_RANKS = (8, 16, 64)
_TOKENS = (1, 4, 16, 64, 256, 2048)
_ADAPTERS = (1, 4, 16)
_DTYPES = ("bfloat16", "float32")
_IN_THE_RACE = 2.0  # a strategy slower than the best by this factor is not timed to the end
_ROUNDS, _QUICK_ROUNDS = 9, 5
_TURNS_PER_ROUND = 3  # strategies are close to one another, and the report contains the worst of many cells
_ENOUGH_S = 0.15  # of each strategy in a cell, after which fewer turns suffice
_FAR = 1.1  # times the best strategy's time; a chosen strategy slower than this is timed again
_MOST_GATHERED_BYTES = 2**30  # memory limit of gathering factors per token; larger cells omit that baseline


def cases(quick: bool) -> dict[str, bool]:
    """On a GPU if there is one (`gpu/styles.py`), else on one thread of a CPU; quick: the smaller shape, one rank."""
    return {"GPU" if torch.cuda.is_available() else "CPU": quick}


def measure(quick: bool) -> Measured:
    if torch.cuda.is_available():
        return styles.measure_all(quick)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    atmm.load_kernels()
    rows: list[dict[str, Any]] = []
    spreads: list[dict[str, list[float]]] = []
    with torch.inference_mode():
        for case in _cases(quick):
            row, seconds = measure_cell(case, _QUICK_ROUNDS if quick else _ROUNDS)
            rows.append(row)
            spreads.append(seconds)
    spread = spread_of(spreads)
    return Measured(rows, {"spread": spread}, goals_of(rows, spread))


_MIDDLE = ("rank", "adapters")
_OTHERS = ("PEFT layer", "gather and bmm", "padded einsum", "plain loop", "bgmv", "sgmv", "mbgmm", "vllm", "sglang")


def pictures(rows: Sequence[Row]) -> dict[str, Picture]:
    """Times of the even cells of the middle rank and number of adapters; the strategy that is chosen in each cell."""
    middle = {name: sorted({row[name] for row in rows})[len({row[name] for row in rows}) // 2] for name in _MIDDLE}
    even = select(rows, {"segments": "even", **middle})
    times = [{**row, **{name: row["us"] * row[name] for name in _OTHERS if row.get(name)}} for row in even]
    latency = {
        "kind": "lines",
        "each": ["layer", "dtype"],
        "title": "{layer}, {dtype}",
        "x": "tokens",
        "series": [{"y": name, "name": name} for name in ("us", *_OTHERS) if any(row.get(name) for row in even)],
        "ticked": True,
        "log": "y",
        "settings": {"xlabel": "tokens", "ylabel": "us"},
    }
    chosen = [
        {**row, "rank, adapters": (row["rank"], row["adapters"]), "strategy": row["chosen"].split()[0]} for row in rows
    ]
    strategies = {
        "kind": "cells",
        "each": ["layer", "dtype", "segments"],
        "title": "{layer}, {dtype}, {segments}",
        "x": "tokens",
        "y": "rank, adapters",
        "name": "{strategy}",
    }
    title = ", ".join(f"{name} {value}" for name, value in middle.items())
    return {"latency": Picture(times, [latency], title), "chosen": Picture(chosen, [strategies])}


BENCH = Bench(name="atmm", cases=cases, measure=measure, pictures=pictures)


def _cases(quick: bool) -> list[Case]:
    cases = []
    for shape, rank, num_tokens, num_adapters, dtype in itertools.product(
        _SHAPES[:1] if quick else _SHAPES,
        _RANKS[1:2] if quick else _RANKS,
        (4, 64, 256) if quick else _TOKENS,
        (4,) if quick else _ADAPTERS,
        _DTYPES,
    ):
        if num_adapters > num_tokens or (shape.d_in > 1000 and num_tokens > 256):
            continue
        cases.append(Case(shape, rank, dtype, num_adapters, num_tokens, True))
        if 1 < num_adapters < num_tokens:
            cases.append(Case(shape, rank, dtype, num_adapters, num_tokens, False))
    return cases


def measure_cell(case: Case, rounds: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """A cell's row, and the seconds of every call in it."""
    group = case.group("cpu")
    (site,) = group.sites
    assert group.packed is not None
    x, (ours,) = case.input("cpu")
    rows = x.new_zeros(case.num_tokens, site.d_out)
    plan = case.plan()
    names = [name for name in atmm.STRATEGIES if name != "tiled"]
    plans = {name: case.plan(name) for name in names}
    chosen = choose(BatchStats(plan, group.packed.layout))
    strategies = {name: functools.partial(atmm.add_delta, ours, x, site, plan) for name, plan in plans.items()}
    others, read = baselines(site, plan, case.rank, x, rows)
    calls: dict[str, Callable[[], object]] = {"chosen": strategies[chosen], **others}
    caches = DeviceCaches("cpu", x.dtype)
    # Strategies are compared by CPU seconds, as in the search: other load on the machine does not affect the choice.
    # Baselines are compared by wall time.
    among = {
        name: with_cold_caches(call, caches, read_by(name, group), time.process_time)
        for name, call in strategies.items()
    }
    by_strategy = race_strategies(among, chosen, _TURNS_PER_ROUND * rounds)
    best = min(by_strategy, key=by_strategy.__getitem__)
    everything = [*factors_of(group), *read]
    cold = {name: with_cold_caches(call, caches, everything, time.perf_counter) for name, call in calls.items()}
    seconds = by_turns(cold, rounds, shuffled=True)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    table: dict[str, Any] = {
        "layer": f"{site.d_in}x{site.d_out}",
        "rank": case.rank,
        "tokens": case.num_tokens,
        "adapters": case.num_adapters,
        "segments": "even" if case.even else "uneven",
        "dtype": case.dtype,
        "us": median["chosen"] * 1e6,
        "chosen": chosen,
        "best": best,
        "chosen / best": by_strategy[chosen] / by_strategy[best],
    }
    for name in ("gather and bmm", "padded einsum", "plain loop", "PEFT layer"):
        table[name] = median[name] / median["chosen"] if name in median else None
    return table, seconds


def baselines(
    site: atmm.Site, plan: atmm.SegmentPlan, rank: int, x: Tensor, y: Tensor
) -> tuple[dict[str, Callable[[], object]], list[Tensor]]:
    """Calls that add the plan's deltas to `y` without this operator, and the factors that they read."""
    a, bt = lane_factors(site, plan)
    layer = peft_layer(site, plan, rank, x)
    names_by_row = [f"a{lane.key}" for lane in plan.lanes for _ in range(lane.start, lane.stop)]
    calls: dict[str, Callable[[], object]] = {
        "padded einsum": padded_einsum(a, bt, plan, x, y),
        "PEFT layer": functools.partial(layer, x, adapter_names=names_by_row),
        "plain loop": lambda: plain_loop(site, plan, x, y),
    }
    if len(x) * rank * (site.d_in + site.d_out) * x.element_size() <= _MOST_GATHERED_BYTES:
        calls["gather and bmm"] = gather_bmm(a, bt, plan, x, y)
    return calls, [a, bt, *layer.parameters()]


def race_strategies(among: Mapping[str, Callable[[], float]], chosen: str, turns: int) -> dict[str, float]:
    """Seconds by strategy. The minimum of several is biased by luck: if the chosen strategy is far behind, it and
    those ahead of it are timed once more, and the second times replace the first in any case.
    """
    seconds = race(among, turns, _IN_THE_RACE, _ENOUGH_S)
    if seconds[chosen] <= _FAR * min(seconds.values()):
        return seconds
    finalists = {name: call for name, call in among.items() if seconds[name] <= seconds[chosen]}
    return race(finalists, 2 * turns, _IN_THE_RACE, 2 * _ENOUGH_S, seed=1)


def with_cold_caches(
    call: Callable[[], object], caches: DeviceCaches, factors: Sequence[Tensor], clock: Callable[[], float]
) -> Callable[[], float]:
    """Seconds of a call with factors in memory, not in a cache."""

    def timed() -> float:
        caches.evict(factors)
        started = clock()
        call()
        return clock() - started

    return timed


def spread_of(cells: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """p95 / p50 of the chosen strategy and of the others, over the calls of all cells, each relative to the median of
    its cell: the 95th percentile of the few calls of one cell would be its maximum.
    """
    relative: dict[str, list[float]] = {"chosen": [], "others": []}
    for cell in cells:
        for name, seconds in cell.items():
            median = statistics.median(seconds)
            relative["chosen" if name == "chosen" else "others"] += [taken / median for taken in seconds]
    return {name: statistics.quantiles(all_, n=20)[-1] / statistics.median(all_) for name, all_ in relative.items()}


def goals_of(rows: Sequence[dict[str, Any]], spread: Mapping[str, float]) -> list[Goal]:
    def ratios(name: str, **wanted: Any) -> list[float]:
        return [row[name] for row in rows if row[name] and all(row[key] == value for key, value in wanted.items())]

    small = [
        row["plain loop"] for row in rows if row["dtype"] == "bfloat16" and row["tokens"] <= 64 and row["adapters"] >= 4
    ]
    several = [row["PEFT layer"] for row in rows if row["adapters"] > 1]
    einsum_elsewhere = ratios("padded einsum", segments="even")
    return [
        Goal("chosen / best single strategy, worst cell", max(ratios("chosen / best")), 1.1, True),
        Goal("p95 / p50 of all calls, chosen over theirs", spread["chosen"] / spread["others"], 1.0, True),
        Goal("gather and bmm / chosen, geometric mean", _mean(ratios("gather and bmm")), 8.0, False),
        Goal(
            "padded einsum / chosen, uneven, geometric mean",
            _mean(ratios("padded einsum", segments="uneven")),
            2.0,
            False,
        ),
        Goal("padded einsum / chosen, even, worst cell", min(einsum_elsewhere), 1.0, False),
        Goal("plain loop / chosen, bfloat16, up to 64 tokens, 4 adapters or more", _mean(small), 1.8, False),
        Goal("PEFT layer / chosen, geometric mean", _mean(several), 2.5, False),
    ]


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
