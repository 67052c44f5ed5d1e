"""Plots of `vlora bench split`, beside the paper's numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib import pyplot

from benchmarks.split import mixed

# Numbers of the paper's text and tables (Symbiosis, https://arxiv.org/abs/2507.03220).


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

FITTING_COPIES, FITTING_CLIENTS = 2, 5
"""Trainings that fit on one GPU with copies of the model, and with an executor (section 4.1.2)."""


matplotlib.use("agg")

Row = Mapping[str, Any]
HERE, PAPER = "#1f6f9f", "#d98c3f"
_COLORS = ("#1f6f9f", "#8fbcd9", "#2f9e63", "#c8a415")
_KIND_COLORS = {"decode": "#1f6f9f", "prefill": "#8fbcd9", "train": "#2f9e63"}
_KIND_NAMES = {"decode": "generation", "prefill": "prefill", "train": "training"}


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Write memory.png, table5.png and figures22-23.png of the parts that the rows are of."""
    if any(row["what"] == "memory" for row in rows):
        figure, axis = pyplot.subplots(figsize=(10, 4.2), layout="constrained")
        memory(axis, rows)
        axis.set_title(
            "memory of trainings, all processes "
            f"(Symbiosis, figure 10: with an executor {FITTING_CLIENTS} fit on a GPU, with copies {FITTING_COPIES})",
            fontsize=10,
        )
        _save(figure, folder / "memory.png")
    if shown := _of(rows, "table 5"):
        figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
        for axis, draw in zip(axes, table_5(rows), strict=True):
            draw(axis)
        figure.suptitle(f"{shown[0]['clients']} decoding clients of different batch sizes (Symbiosis, table 5)")
        _save(figure, folder / "table5.png")
    if _of(rows, mixed.WHAT):
        figure = pyplot.figure(figsize=(13, 6.4), layout="constrained")
        grid = figure.subplots(2, 2, gridspec_kw={"width_ratios": (1.7, 1)})
        for (left, _), way in zip(grid, (mixed.ALL, mixed.MIXED), strict=True):
            throughput(left, rows, way)
        grid[1][0].sharey(grid[0][0])
        grid[0][0].autoscale(axis="y")
        latency(grid[0][1], rows)
        tokens(grid[1][1], rows)
        figure.suptitle("decoding beside training on one executor (Symbiosis, figures 22 and 23)")
        _save(figure, folder / "figures22-23.png")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _of(rows: Sequence[Row], what: str) -> list[Row]:
    return [row for row in rows if row["what"].startswith(what)]


def memory(axis: Any, rows: Sequence[Row]) -> None:
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


def table_5(rows: Sequence[Row]) -> list[Callable[[Any], None]]:
    """A panel for each column of the table: the paper's values and ours, each relative to no lockstep."""
    here = {row["way"]: row for row in _of(rows, "table 5")}

    def draw(title: str, column: str, field: str, axis: Any) -> None:
        absolute = column == "calls a product"
        ours, papers = [here[way][column] for way in TABLE_5], [getattr(each, field) for each in TABLE_5.values()]
        for values, color, label, offset in ((papers, PAPER, "the paper", -0.2), (ours, HERE, "here", 0.2)):
            heights = values if absolute else [value / values[0] for value in values]
            drawn = axis.bar([place + offset for place in range(3)], heights, 0.38, color=color, label=label)
            axis.bar_label(drawn, [f"{value:.3g}" for value in values], fontsize=8, padding=1)
        axis.set_xticks(range(3), list(TABLE_5), fontsize=8)
        axis.set(title=title, ylabel="" if absolute else "relative to no lockstep")
        _finish(axis)

    return [functools.partial(draw, title, *names) for title, names in _COLUMNS.items()]


def throughput(axis: Any, rows: Sequence[Row], way: str) -> None:
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


def latency(axis: Any, rows: Sequence[Row]) -> None:
    """Latency of a token in each way beside the paper's, relative to inference only."""
    ways = {row["way"]: row for row in _of(rows, mixed.WHAT)}
    papers = {0: TOKEN_S, 2: TOKEN_S}  # it has no number of the others
    ours = {place: ways[way]["latency ms"] / 1e3 for place, way in enumerate(mixed.WAYS)}
    names = _names(ways)
    for values, color, label, offset in ((papers, PAPER, "the paper", -0.2), (ours, HERE, "here", 0.2)):
        heights = [value / values[0] for value in values.values()]
        drawn = axis.bar([place + offset for place in values], heights, 0.38, color=color, label=label)
        axis.bar_label(drawn, [f"{value:.2g} s" for value in values.values()], fontsize=7)
    axis.axhline(1.0, color="#888", linewidth=0.8)
    axis.set(title="latency of a token", ylabel="relative to inference only")
    axis.set_xticks(range(len(names)), names, fontsize=8)
    _finish(axis)


def tokens(axis: Any, rows: Sequence[Row]) -> None:
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
