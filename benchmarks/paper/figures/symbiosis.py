"""Symbiosis' figures of memory, batching, and inference beside training: parts of `vlora bench split`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper import drawing
from benchmarks.paper.figure import Code, Found, Panel
from benchmarks.paper.measuring import Measuring
from benchmarks.split import mixed, split
from benchmarks.split.rows import FULL, QUICK, Size
from vlora.bench.report import Goal

_SIZE = FULL._replace(clients=(1, 4, 8), rounds=5, mix=FULL.mix._replace(rounds=2))
"""Fewer numbers of clients and rounds than in the bench, so that all figures together take less than two hours."""


def _size(quick: bool) -> Size:
    return QUICK if quick else _SIZE


def _measure(part: str, measuring: Measuring) -> dict[str, Any]:
    """The rows of a part of `vlora bench split`; figures share them."""
    rows = measuring.once(f"split-{part}", lambda: split.one(part, _size(measuring.setting.quick)))
    return {"rows": rows}


def _ways(found: Found, what: str) -> Mapping[str, Mapping[str, Any]]:
    return {row["way"]: row for row in found["rows"] if row["what"].startswith(what)}


def _goals(found: Found) -> Sequence[Goal]:
    return split.goals_of(found["rows"])


# -- memory: figures 9 and 10 -----------------------------------------------------------------------------------------


def _peak_panels(found: Found) -> list[Panel]:
    ways = _ways(found, "peak")
    series = {who: [row[f"{whose} MiB"] for row in ways.values()] for who, whose in _WHOSE.items()}
    groups = ["own copy (plain PEFT)", "one client and its executor"]
    return [drawing.bars(groups, series, ylabel="MiB beside the weights, at the peak")]


_WHOSE = {"client": "clients", "executor": "executor"}
_FITTING = "trainings in the memory of copies, of the copies"


def _memory_panels(found: Found) -> list[Panel]:
    shown = [row for row in found["rows"] if row["what"] == "memory"]
    numbers = sorted({row["clients"] for row in shown})
    series: dict[str, list[float]] = {}
    for row in shown:
        series.setdefault(row["way"], []).append(row["all MiB"])
    return [drawing.bars([str(number) for number in numbers], series, xlabel="trainings", ylabel="MiB (PSS)")]


def _memory_here(found: Found) -> dict[str, float | None]:
    """Clients that fit in the memory of eight copies in bfloat16 that cannot be shared; none with fewer copies."""
    rows = [row for row in found["rows"] if row["what"] == "memory" and "bfloat16" in row["way"]]
    most = max(row["clients"] for row in rows)
    if most < _SIZE.clients[-1]:  # the executor's own process takes more than it saves
        return {_FITTING: None}
    (copies,) = (row["all MiB"] for row in rows if row["clients"] == most and row["executor MiB"] == 0)
    (through,) = (row for row in rows if row["clients"] == most and row["executor MiB"])
    fitting = math.floor((copies - through["executor MiB"]) / (through["clients MiB"] / most))
    return {_FITTING: max(0, fitting) / most}


# -- batching: table 5 ------------------------------------------------------------------------------------------------


_TABLE_5 = {
    "no lockstep": (94, 1.02, 1),
    "lockstep": (88, 1.6, 8),
    "opportunistic": (103, 0.77, 3.7),
}
"""Tokens a second, latency in seconds, calls computed together on average; eight clients that decode with batch sizes
from 2 to 256 (section 4.5)."""


def _table_panels(found: Found) -> list[Panel]:
    """The columns of the table, the paper's and ours, the first two relative to no lockstep."""
    ways, panels = _ways(found, "table 5"), []
    for place, name in enumerate(("tokens a second", "latency ms", "calls a product")):
        series = {"the paper": [row[place] for row in _TABLE_5.values()], "here": [ways[way][name] for way in _TABLE_5]}
        absolute = name == "calls a product"
        if not absolute:
            series = {who: [value / values[0] for value in values] for who, values in series.items()}
        label = "" if absolute else "relative to no lockstep"
        panels.append(drawing.bars(list(_TABLE_5), series, title=name.removesuffix(" ms"), ylabel=label))
    return panels


def _table_here(found: Found) -> dict[str, float | None]:
    ways = _ways(found, "table 5")
    none, lockstep, opportunistic = (ways[name] for name in ("no lockstep", "lockstep", "opportunistic"))
    return {
        "latency to lockstep's": opportunistic["latency ms"] / lockstep["latency ms"],
        "latency to no lockstep's": opportunistic["latency ms"] / none["latency ms"],
        "throughput to lockstep's": opportunistic["tokens a second"] / lockstep["tokens a second"],
        "throughput to no lockstep's": opportunistic["tokens a second"] / none["tokens a second"],
        "calls a product": opportunistic["calls a product"] / none["calls a product"],
    }


# -- inference and training: figures 22 and 23 ------------------------------------------------------------------------


_TOKEN_S = 1.4
"""Seconds of a token of inference clients, with and without training clients (section 4.4)."""
_KINDS = {"decode": ("generation", "#1f6f9f"), "train": ("training", "#2f9e63"), "prefill": ("prefill", "#8fbcd9")}


def _throughput(found: Found, way: str) -> Panel:
    """Tokens a second over time, in one window of a way."""

    def draw(axis: Any) -> None:
        row = _ways(found, mixed.WHAT)[way]
        curves = dict(zip(mixed.KINDS, row["curves"], strict=True))
        order = [kind for kind in _KINDS if any(curves[kind])]
        names, colors = zip(*(_KINDS[kind] for kind in order), strict=True)
        times = [mixed.BIN_S * (place + 0.5) for place in range(len(curves["decode"]))]
        axis.stackplot(times, [curves[kind] for kind in order], colors=colors, labels=names, step="mid")
        mean = row["tokens a second"]
        axis.axhline(mean, color="#c0504d", linewidth=1.2, linestyle="--", label=f"all windows: {mean:.0f}")
        axis.set(xlabel="seconds", ylabel="tokens a second", title=way)
        axis.legend(fontsize=8)

    return draw


def _inference_panels(found: Found) -> list[Panel]:
    row = _ways(found, mixed.WHAT)[mixed.ALL]
    phases = {"inference": [row["prefill"], row["generation"]]}
    groups = ["a client in prefill", "generation only"]
    return [
        _throughput(found, mixed.ALL),
        drawing.bars(groups, phases, ylabel="tokens a second", title="phases"),
    ]


def _inference_goals(found: Found) -> Sequence[Goal]:
    row = _ways(found, mixed.WHAT)[mixed.ALL]
    return [Goal("figure 22: tokens a second in prefill to generation", row["prefill"] / row["generation"], 1.0, False)]


_RATIO = "latency of a token, mixed to inference only"


def _mix_panels(found: Found) -> list[Panel]:
    ways = _ways(found, mixed.WHAT)
    groups = [*map(drawing.wrapped, mixed.WAYS)]
    latencies = [ways[way]["latency ms"] / 1e3 for way in mixed.WAYS]
    papers = [_TOKEN_S if way in (mixed.ALL, mixed.MIXED) else None for way in mixed.WAYS]  # none of the others
    trained = [ways[way]["training"] for way in mixed.WAYS]
    inferred = [ways[way]["tokens a second"] - part for way, part in zip(mixed.WAYS, trained, strict=True)]
    return [
        _throughput(found, mixed.MIXED),
        drawing.bars(groups, {"the paper": papers, "here": latencies}, title="latency of a token", ylabel="s"),
        drawing.bars(groups, {"inference": inferred, "training": trained}, title="tokens a second"),
    ]


def _mix_here(found: Found) -> dict[str, float | None]:
    return {_RATIO: _ways(found, mixed.WHAT)[mixed.MIXED]["ratio"]}


CODE = {
    "symbiosis:fig9": Code(functools.partial(_measure, "peaks"), _peak_panels),
    "symbiosis:fig10": Code(functools.partial(_measure, "memory"), _memory_panels, _memory_here, _goals),
    "symbiosis:fig22": Code(functools.partial(_measure, "mixed"), _inference_panels, goals=_inference_goals),
    "symbiosis:fig23": Code(functools.partial(_measure, "mixed"), _mix_panels, _mix_here, _goals),
    "symbiosis:table5": Code(functools.partial(_measure, "table5"), _table_panels, _table_here, _goals),
}
