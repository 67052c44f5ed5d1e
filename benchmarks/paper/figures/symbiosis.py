"""Symbiosis' figures of memory, batching, and inference beside training: parts of `vlora bench split`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper import drawing
from benchmarks.paper.figure import Code, Found, Panel
from benchmarks.paper.measuring import Measuring
from benchmarks.split import mixed, plots, split
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
    return [lambda axis: plots.memory(axis, found["rows"])]


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


def _table_panels(found: Found) -> list[Panel]:
    return list(plots.table_5(found["rows"]))


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


def _inference_panels(found: Found) -> list[Panel]:
    row = _ways(found, mixed.WHAT)[mixed.ALL]
    phases = {"inference": [row["prefill"], row["generation"]]}
    groups = ["a client in prefill", "generation only"]
    return [
        lambda axis: plots.throughput(axis, found["rows"], mixed.ALL),
        drawing.bars(groups, phases, ylabel="tokens a second", title="phases"),
    ]


def _inference_goals(found: Found) -> Sequence[Goal]:
    row = _ways(found, mixed.WHAT)[mixed.ALL]
    return [Goal("figure 22: tokens a second in prefill to generation", row["prefill"] / row["generation"], 1.0, False)]


_RATIO = "latency of a token, mixed to inference only"


def _mix_panels(found: Found) -> list[Panel]:
    rows = found["rows"]
    return [
        lambda axis: plots.throughput(axis, rows, mixed.MIXED),
        lambda axis: plots.latency(axis, rows),
        lambda axis: plots.tokens(axis, rows),
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
