"""The plots of all benchmarks: a few kinds, each drawn from the rows of a report."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vlora.bench.report import Row
from vlora.errors import BadConfig
from vlora.run_folder import whole

COLORS = ("#1f6f9f", "#2f9e63", "#c0504d", "#8064a2", "#7f7f7f", "#c8a415", "#17a2b8", "#e377c2")
_MAX_HORIZONTAL_LABELS = 15  # of the bars of a panel; more would overlap, so they are vertical


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """A picture with one panel or several.

    Attributes:
        file: Its name without ".png".
        kind: "lines" over `x`; "bars" in groups of `x`; "tiles": a cell for each `x` and `y[0]`, coloured by `by`.
        x: A column.
        y: Columns; each is a series, or a panel if `apart`.
        by: Columns of which each combination of values is a series.
        panels: Columns of which each combination of values is a panel.
        where: Which rows are drawn.
        middle: Columns of which only the middle value is drawn.
        log: Logarithmic axes: "", "x", "y" or "xy".
        derive: Makes the drawn rows from those of the report.
    """

    file: str
    kind: Literal["lines", "bars", "tiles"] = "lines"
    x: str
    y: Sequence[str]
    by: Sequence[str] = ()
    panels: Sequence[str] = ()
    where: Callable[[Row], bool] = lambda _: True
    middle: Sequence[str] = ()
    apart: bool = False
    log: str = ""
    title: str = ""
    ylabel: str = ""
    derive: Callable[[Sequence[Row]], Iterable[Row]] = lambda rows: rows


def require_matplotlib() -> None:
    """Raises BadConfig: matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BadConfig("--out needs matplotlib for its pictures; pip install 'vlora[bench]'")


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw(plots: Sequence[Plot], rows: Sequence[Row], folder: Path) -> None:
    """Write the plots that have rows, as PNG."""
    for plot in plots:
        chosen = [row for row in plot.derive(rows) if plot.where(row)]
        for column in plot.middle:
            found = sorted({row[column] for row in chosen})
            chosen = [row for row in chosen if row[column] == found[len(found) // 2]]
        if chosen:
            folder.mkdir(parents=True, exist_ok=True)
            _draw(plot, chosen, folder / f"{plot.file}.png")


def _draw(plot: Plot, rows: Sequence[Row], path: Path) -> None:
    kinds = _values(rows, plot.panels)
    shown = list(itertools.product(kinds, [(column,) for column in plot.y] if plot.apart else [tuple(plot.y)]))
    columns = min(4, len(shown))
    lines_of_panels = -(-len(shown) // columns)
    figure = pyplot().figure(figsize=(1.5 + 3.9 * columns, 0.6 + 3.6 * lines_of_panels), layout="constrained")
    axes = figure.subplots(lines_of_panels, columns, squeeze=False)
    for axis, panel in itertools.zip_longest(axes.flat, shown):
        if panel is None:
            axis.axis("off")
            continue
        kind, series = panel
        own = [row for row in rows if _key(row, plot.panels) == kind]
        _draw_panel(axis, plot, own, series)
        words = [f"{name} {value}" for name, value in zip(plot.panels, kind, strict=True)]
        axis.set_title(", ".join([*words, *(series if plot.apart else ())]), fontsize=9)
    fixed = ", ".join(f"{name} {rows[0][name]}" for name in plot.middle)
    figure.suptitle(", ".join(filter(None, (plot.title, fixed))), fontsize=11)
    with whole(path, durable=False) as part:
        figure.savefig(part, dpi=110, format="png")
    pyplot().close(figure)


def _draw_panel(axis: Any, plot: Plot, rows: Sequence[Row], columns: Sequence[str]) -> None:
    across = list(dict.fromkeys(row[plot.x] for row in rows))
    if plot.kind == "tiles":
        tiles(axis, [(row[plot.x], row[plot.y[0]], " ".join(str(row[name]) for name in plot.by)) for row in rows])
        axis.set(xlabel=plot.x)
        return
    if plot.kind == "lines":
        across.sort()
    curves: dict[str, list[float | None]] = {}
    for key, column in itertools.product(_values(rows, plot.by), columns):
        at = {row[plot.x]: row.get(column) for row in rows if _key(row, plot.by) == key}
        parts = [*map(str, key), *([column] if len(columns) > 1 else [])]
        curves[", ".join(parts) or column] = [at.get(x) for x in across]
    known = {name: values for name, values in curves.items() if any(value is not None for value in values)}
    label = plot.ylabel or (columns[0] if len(columns) == 1 else "")
    if plot.kind == "bars":
        bars(axis, [str(x) for x in across], known, ylabel=label)
    else:
        lines(axis, known, across, xlabel=plot.x, ylabel=label)
    if "x" in plot.log:
        ticks(axis, across)
    if "y" in plot.log:
        axis.set_yscale("log")


def _key(row: Row, columns: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row[name] for name in columns)


def _values(rows: Sequence[Row], columns: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(_key(row, columns) for row in rows))


def lines(axis: Any, curves: Mapping[str, Sequence[float | None]], across: Sequence[float], **settings: Any) -> None:
    """A line for each entry of `curves` over `across`; a legend; further settings of the axis."""
    for place, (name, values) in enumerate(curves.items()):
        known = [(x, y) for x, y in zip(across, values, strict=True) if y is not None]
        width = max(1.2, 3.2 - 0.9 * place)  # a line under another one remains visible
        mark = "o-" if len(known) < 50 else "-"
        color = COLORS[place % len(COLORS)]
        axis.plot(*zip(*known, strict=True), mark, color=color, label=name, markersize=4, linewidth=width)
    axis.set(**settings)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def bars(axis: Any, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], **settings: Any) -> None:
    """Grouped bars, each with its value."""
    width = 0.8 / len(series)
    upright = len(groups) * len(series) > _MAX_HORIZONTAL_LABELS
    for place, (name, values) in enumerate(series.items()):
        at = [number + width * (place - (len(series) - 1) / 2) for number in range(len(groups))]
        shown = [0.0 if value is None else value for value in values]
        drawn = axis.bar(at, shown, width * 0.94, color=COLORS[place % len(COLORS)], label=name)
        labels = ["" if value is None else short(value) for value in values]
        axis.bar_label(drawn, labels, fontsize=7, padding=1, rotation=90 if upright else 0)
    finish_bars(axis, groups, settings)


def finish_bars(axis: Any, groups: Sequence[str], settings: Mapping[str, Any]) -> None:
    turned = sum(max(map(len, name.split("\n"))) for name in groups) > 80  # letters that fit side by side
    axis.set_xticks(range(len(groups)), groups, fontsize=8 if len(groups) < 5 else 7, rotation=25 if turned else 0)
    axis.set(**settings)
    axis.grid(alpha=0.3, axis="y")
    axis.set_axisbelow(True)
    axis.margins(y=0.15)
    axis.legend(fontsize=8)


def tiles(axis: Any, cells: Sequence[tuple[Any, Any, str]]) -> None:
    """A coloured cell for each x and y, with a legend of the colours' names."""
    across, down = sorted({x for x, _, _ in cells}), sorted({y for _, y, _ in cells})
    names = sorted({name for _, _, name in cells})
    for number, name in enumerate(names):
        at = [(across.index(x), down.index(y)) for x, y, own in cells if own == name]
        axis.scatter(*zip(*at, strict=True), marker="s", s=150, color=COLORS[number % len(COLORS)], label=name)
    axis.set_xticks(range(len(across)), [str(x) for x in across], fontsize=8)
    axis.set_yticks(range(len(down)), [str(y) for y in down], fontsize=7)
    axis.set(xlim=(-0.6, len(across) - 0.4), ylim=(-0.6, len(down) - 0.4))
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=3)


def ticks(axis: Any, values: Sequence[float]) -> None:
    """Exactly these ticks on a logarithmic x axis."""
    axis.set_xscale("log")
    axis.set_xticks(list(values), [f"{value:g}" for value in values], minor=False)
    axis.minorticks_off()


def short(value: float) -> str:
    """A number with three digits, without an exponent."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
