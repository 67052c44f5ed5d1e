"""Symbiosis' figures of memory, batching, and inference beside training: parts of `vlora bench split`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.paper import drawing
from benchmarks.paper.figure import Code, Found, Panel
from benchmarks.paper.measuring import Measuring
from benchmarks.split import mixed, split
from benchmarks.split.rows import FULL, QUICK, Size
from vlora.bench.report import Goal

Row = Mapping[str, Any]


class Batching(NamedTuple):
    """A line of table 5. calls: computed together on average."""

    tokens_per_s: float
    latency_s: float
    calls: float


TABLE_5 = {
    "no lockstep": Batching(94, 1.02, 1),
    "lockstep": Batching(88, 1.6, 8),
    "opportunistic": Batching(103, 0.77, 3.7),
}
"""Eight clients that decode with batch sizes from 2 to 256 (section 4.5)."""

TOKEN_S = 1.4
"""Seconds of a token of inference clients, with and without training clients (section 4.4)."""

_COLORS = ("#1f6f9f", "#8fbcd9", "#2f9e63", "#c8a415")
_KIND_COLORS = {"decode": "#1f6f9f", "prefill": "#8fbcd9", "train": "#2f9e63"}
_KIND_NAMES = {"decode": "generation", "prefill": "prefill", "train": "training"}

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
    return [lambda axis: _memory(axis, found["rows"])]


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
    return [*_table_5(found["rows"])]


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
        lambda axis: _throughput(axis, found["rows"], mixed.ALL),
        drawing.bars(groups, phases, ylabel="tokens a second", title="phases"),
    ]


def _inference_goals(found: Found) -> Sequence[Goal]:
    row = _ways(found, mixed.WHAT)[mixed.ALL]
    return [Goal("figure 22: tokens a second in prefill to generation", row["prefill"] / row["generation"], 1.0, False)]


_RATIO = "latency of a token, mixed to inference only"


def _mix_panels(found: Found) -> list[Panel]:
    rows = found["rows"]
    return [
        lambda axis: _throughput(axis, rows, mixed.MIXED),
        lambda axis: _latency(axis, rows),
        lambda axis: _tokens(axis, rows),
    ]


def _mix_here(found: Found) -> dict[str, float | None]:
    return {_RATIO: _ways(found, mixed.WHAT)[mixed.MIXED]["ratio"]}


# -- panels ----------------------------------------------------------------------------------------------------------


def _of(rows: Sequence[Row], what: str) -> list[Row]:
    return [row for row in rows if row["what"].startswith(what)]


def _memory(axis: Any, rows: Sequence[Row]) -> None:
    """Memory of all processes by the number of trainings; the executor's part hatched."""
    shown = _of(rows, "memory")
    numbers = sorted({row["clients"] for row in shown})
    ways = list(dict.fromkeys(row["way"] for row in shown))
    for place, way in enumerate(ways):
        of_way = {row["clients"]: row for row in shown if row["way"] == way}
        at = [number + 0.2 * (place - (len(ways) - 1) / 2) for number in range(len(numbers))]
        whole = [of_way[number]["all MiB"] for number in numbers]
        executor = [of_way[number]["executor MiB"] for number in numbers]
        drawn = axis.bar(at, whole, 0.19, color=_COLORS[place], label=way)
        axis.bar(at, executor, 0.19, color="none", edgecolor="#333", hatch="///", linewidth=0)
        axis.bar_label(drawn, [f"{value:,.0f}" for value in whole], fontsize=7, padding=1)
    axis.bar([0], [0], color="none", edgecolor="#333", hatch="///", linewidth=0, label="of it the executor")
    axis.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    axis.set(xlabel="trainings", ylabel="MiB (PSS)")
    _finish(axis)


_COLUMNS = {
    "tokens a second": ("tokens a second", "tokens_per_s"),
    "latency (s; here ms)": ("latency ms", "latency_s"),
    "calls a product": ("calls a product", "calls"),
}
"""Columns of table 5: those of a row, and of the paper's."""


def _table_5(rows: Sequence[Row]) -> list[Callable[[Any], None]]:
    """A panel for each column of the table: the paper's values and ours, each relative to no lockstep."""
    here = {row["way"]: row for row in _of(rows, "table 5")}

    def draw(title: str, column: str, field: str, axis: Any) -> None:
        absolute = column == "calls a product"
        ours, papers = [here[way][column] for way in TABLE_5], [getattr(each, field) for each in TABLE_5.values()]
        for values, color, label, offset in (
            (papers, drawing.PAPER, "the paper", -0.2),
            (ours, drawing.HERE, "here", 0.2),
        ):
            heights = values if absolute else [value / values[0] for value in values]
            drawn = axis.bar([place + offset for place in range(3)], heights, 0.38, color=color, label=label)
            axis.bar_label(drawn, [f"{value:.3g}" for value in values], fontsize=8, padding=1)
        axis.set_xticks(range(3), list(TABLE_5), fontsize=8)
        axis.set(title=title, ylabel="" if absolute else "relative to no lockstep")
        _finish(axis)

    return [functools.partial(draw, title, *names) for title, names in _COLUMNS.items()]


def _throughput(axis: Any, rows: Sequence[Row], way: str) -> None:
    """Tokens a second over time, in one window of a way."""
    ways = {row["way"]: row for row in _of(rows, mixed.WHAT)}
    curves = dict(zip(mixed.KINDS, ways[way]["curves"], strict=True))
    times = [mixed.BIN_S * (place + 0.5) for place in range(len(curves["decode"]))]
    order = [kind for kind in ("decode", "train", "prefill") if any(curves[kind])]
    axis.stackplot(
        times,
        [curves[kind] for kind in order],
        colors=[_KIND_COLORS[kind] for kind in order],
        labels=[_KIND_NAMES[kind] for kind in order],
        step="mid",
    )
    mean = ways[way]["tokens a second"]
    axis.axhline(mean, color="#c0504d", linewidth=1.2, linestyle="--", label=f"all windows: {mean:.0f}")
    axis.set(xlabel="seconds", ylabel="tokens a second", title=_clients(ways, way))
    _finish(axis)


def _clients(ways: Mapping[str, Row], way: str) -> str:
    inference, of_mix = ways[mixed.ALL]["clients"], ways[mixed.FEWER]["clients"]
    if way == mixed.ALL:
        return f"{inference} inference clients"
    return f"{of_mix} inference and {inference - of_mix} training clients"


def _latency(axis: Any, rows: Sequence[Row]) -> None:
    """Latency of a token in each way beside the paper's, relative to inference only."""
    ways = {row["way"]: row for row in _of(rows, mixed.WHAT)}
    papers = {0: TOKEN_S, 2: TOKEN_S}  # it has no number of the others
    ours = {place: ways[way]["latency ms"] / 1e3 for place, way in enumerate(mixed.WAYS)}
    names = _names(ways)
    for values, color, label, offset in ((papers, drawing.PAPER, "the paper", -0.2), (ours, drawing.HERE, "here", 0.2)):
        heights = [value / values[0] for value in values.values()]
        drawn = axis.bar([place + offset for place in values], heights, 0.38, color=color, label=label)
        axis.bar_label(drawn, [f"{value:.2g} s" for value in values.values()], fontsize=7)
    axis.axhline(1.0, color="#888", linewidth=0.8)
    axis.set(title="latency of a token", ylabel="relative to inference only")
    axis.set_xticks(range(len(names)), names, fontsize=8)
    _finish(axis)


def _tokens(axis: Any, rows: Sequence[Row]) -> None:
    """Tokens a second of each way."""
    ways = {row["way"]: row for row in _of(rows, mixed.WHAT)}
    names, trained = _names(ways), [ways[way]["training"] for way in mixed.WAYS]
    whole = [ways[way]["tokens a second"] for way in mixed.WAYS]
    rest = [each - training for each, training in zip(whole, trained, strict=True)]
    axis.bar(range(len(names)), rest, 0.6, color=_KIND_COLORS["decode"], label="inference")
    drawn = axis.bar(range(len(names)), trained, 0.6, bottom=rest, color=_KIND_COLORS["train"], label="training")
    axis.bar_label(drawn, [f"{value:.0f}" for value in whole], fontsize=7)
    axis.set(title="tokens a second", xlabel="clients: inference + training")
    axis.set_xticks(range(len(names)), names, fontsize=8)
    _finish(axis)


def _names(ways: Mapping[str, Row]) -> list[str]:
    """The ways by their numbers of clients."""
    inference, of_mix = ways[mixed.ALL]["clients"], ways[mixed.FEWER]["clients"]
    mixture = f"{of_mix} + {inference - of_mix}"
    return [str(inference), str(of_mix), mixture, f"{mixture},\nwhole calls"]


def _finish(axis: Any) -> None:
    axis.grid(alpha=0.3, axis="y")
    axis.set_axisbelow(True)
    axis.margins(y=0.18)
    axis.legend(fontsize=8)


CODE = {
    "symbiosis:fig9": Code(functools.partial(_measure, "peaks"), _peak_panels),
    "symbiosis:fig10": Code(functools.partial(_measure, "memory"), _memory_panels, _memory_here, _goals),
    "symbiosis:fig22": Code(functools.partial(_measure, "mixed"), _inference_panels, goals=_inference_goals),
    "symbiosis:fig23": Code(functools.partial(_measure, "mixed"), _mix_panels, _mix_here, _goals),
    "symbiosis:table5": Code(functools.partial(_measure, "table5"), _table_panels, _table_here, _goals),
}
