"""The kinds of plot of the papers' figures, the panel of the paper's numbers beside ours, and saving with a caption."""

from __future__ import annotations

import functools
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.paper.figure import HERE, PAPERS, THE_PAPER, Fact, Figure, Found, select
from benchmarks.paper.measuring import Setting
from vlora.bench import plots
from vlora.bench.plots import COLORS, pyplot
from vlora.bench.report import Row

_CAPTION_WIDTH = 17  # characters per inch
_BESIDE = {THE_PAPER: "#d98c3f", HERE: "#1f6f9f"}


def save(figure: Figure, found: Found, setting: Setting, path: Path) -> None:
    """Draw a figure with its title and a caption, and write it as PNG."""
    width, height = figure.size
    text = textwrap.fill(caption(figure, setting), int(width * _CAPTION_WIDTH / 1.12))
    lines = text.count("\n") + 1
    extra = 0.19 * lines + 0.12
    canvas = pyplot().figure(figsize=(width, height + extra), layout="constrained")
    bottom = extra / (height + extra)
    canvas.get_layout_engine().set(rect=(0, bottom, 1, 1 - bottom))  # type: ignore[union-attr,call-arg]
    draw(figure, found, canvas)
    canvas.suptitle(f"{_name(figure)}: {figure.title}", fontsize=12)
    canvas.text(0.012, 0.012, text, fontsize=8, color="#444", va="bottom", linespacing=1.25)
    canvas.savefig(path, dpi=100)
    pyplot().close(canvas)


def draw(figure: Figure, found: Found, canvas: Any) -> None:
    """Draw the panels of a figure."""
    rows = figure.rows(found)
    drawn = [each for stated in figure.panels for each in _panels(rows, Panel(**stated))]
    if figure.beside is not None:
        drawn.append(functools.partial(beside, figure.facts, figure.here(found), figure.beside))
    across = len(drawn) // figure.lines
    grid = canvas.subplots(figure.lines, across, squeeze=False, width_ratios=figure.widths)
    for panel, axis in zip(drawn, grid.flat, strict=True):
        panel(axis)


def caption(figure: Figure, setting: Setting) -> str:
    """The figure's caption with the device and the model."""
    kind = "Simulated with costs measured on" if figure.simulated else "Measured on"
    return f"{figure.caption} {kind}: {figure.device_words(setting)}; {figure.model or setting.model_words}."


def _name(figure: Figure) -> str:
    paper = PAPERS[figure.paper].partition(":")[0]
    kind = "Figure" if figure.number.startswith("fig") else "Table"
    return f"{paper}, {kind} {figure.number.removeprefix('fig').removeprefix('table')}"


class Panel(NamedTuple):
    """A panel of a figure. Texts have values of a row as {column}.

    Attributes:
        kind: Of the plot: a key of `_KINDS`.
        where: The rows.
        each: Columns; each combination of their values has a panel.
        columns: Labels of y axes by column; each has a panel.
        title: With values of the first row.
        x: A column, or a text.
        y: A column.
        name: Of the series that a row belongs to, a text.
        series: Other values of these attributes and of `where`, if rows belong to several series.
        labels: Names of series and groups in place of those of the rows.
        ticked: Whether the x axis is logarithmic and has ticks at the values only.
        log: Logarithmic axes: "", "y" or "xy".
        room: The y axis is longer by this factor, for the legend.
        legend: Its settings.
        settings: Further ones of the axis.
        options: Arguments of this kind of plot.
    """

    kind: str
    where: Mapping[str, Any] = {}
    each: Sequence[str] = ()
    columns: Mapping[str, str] = {}
    title: str = ""
    x: str = ""
    y: str = ""
    name: str = HERE
    series: Sequence[Mapping[str, Any]] = ({},)
    labels: Mapping[str, str] = {}
    ticked: bool = False
    log: str = ""
    room: float = 1.0
    legend: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}

    def points(self, rows: Sequence[Row]) -> list[tuple[str, Any, float | None]]:
        """Name, x and y of the series' rows."""
        found = []
        for stated in self.series:
            own = self._replace(**stated)
            for row in select(rows, own.where):
                name, x = own.name.format_map(row), own.x.format_map(row) if "{" in own.x else row[own.x]
                found.append((self.labels.get(name, name), x, row.get(own.y)))
        return found

    def finish(self, axis: Any) -> None:
        """Logarithmic axes with plain numbers, and the legend."""
        if "x" in self.log:
            axis.set_xscale("log")
            axis.grid(alpha=0.3, which="both")
        if "y" in self.log:
            axis.set_yscale("log")
        if self.room != 1.0:
            axis.set_ylim(top=self.room * axis.get_ylim()[1])
        if "y" in self.log:
            low, high = axis.get_ylim()
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}" if high < 30 * low else "")
            axis.tick_params(axis="y", which="minor", labelsize=7)
        axis.legend(**{"fontsize": 8, **self.legend})


def _panels(rows: Sequence[Row], panel: Panel) -> Iterator[Callable[[Any], None]]:
    rows = select(rows, panel.where)
    for values in dict.fromkeys(tuple(row[column] for column in panel.each) for row in rows):
        own = select(rows, dict(zip(panel.each, values, strict=True)))
        titled = {"title": panel.title.format_map(own[0]), **panel.settings}
        for column, label in (panel.columns or {panel.y: titled.get("ylabel", "")}).items():
            shown = panel._replace(y=column, settings={**titled, "ylabel": label})
            yield functools.partial(_KINDS[panel.kind], rows=own, panel=shown, **panel.options)


def lines(
    axis: Any,
    rows: Sequence[Row],
    panel: Panel,
    *,
    styles: Mapping[str, Mapping[str, Any]] = {},
    mark: tuple[float, str] | None = None,
    stars: Mapping[str, Any] | None = None,
    note: str = "",
) -> None:
    """A line for each series.

    Args:
        axis: To draw on.
        rows: All of the panel.
        panel: The series.
        styles: Of lines by name of their series.
        mark: A vertical line, and its text.
        stars: Single points, in the colour of the series with their name; hollow ones are `simulated`.
        note: A text at each point: of the first series above, of the second below it.
    """
    points = panel.points(rows)
    names = list(dict.fromkeys(name for name, _, _ in points))
    curves = {name: [y if own == name else None for own, _, y in points] for name in names}
    plots.lines(axis, curves, [x for _, x, _ in points], **panel.settings)
    for line in axis.get_lines():
        line.set(**styles.get(line.get_label(), {}))
    for row in () if stars is None else select(rows, stars):
        color = COLORS[names.index(panel.name.format_map(row))]
        fill = "none" if row["simulated"] else color
        style = {"color": color, "markerfacecolor": fill, "markersize": 12, "zorder": 5}
        axis.plot(row[panel.x], row[panel.y], "*", label=row.get("label"), **style)
    for place, row in enumerate(rows if note else ()):
        line = names.index(panel.name.format_map(row))
        offset = (0, -14 - 10 * (place % 2) if line else 7)
        style = {"fontsize": 7, "color": COLORS[line], "ha": "center"}
        axis.annotate(
            note.format_map(row), (row[panel.x], row[panel.y]), xytext=offset, textcoords="offset points", **style
        )
    if panel.ticked:
        plots.ticks(axis, sorted({x for _, x, _ in points}))
    if mark is not None:
        axis.axvline(mark[0], color="#999", linestyle=":")
        style = {"transform": axis.get_xaxis_transform(), "fontsize": 8, "color": "#666", "ha": "right"}
        axis.text(mark[0], 0.95, f"{mark[1]} ", **style)
    panel.finish(axis)


def bars(axis: Any, rows: Sequence[Row], panel: Panel, *, relative: bool = False, wrap: bool = False) -> None:
    """Bars with their values, in a group for each x. relative: to the series' first. wrap: whether labels of groups are
    wrapped.
    """
    points = panel.points(rows)
    across = list(dict.fromkeys(x for _, x, _ in points))
    series: dict[str, list[float | None]] = {}
    for name in dict.fromkeys(name for name, _, _ in points):
        at = {x: y for own, x, y in points if own == name}
        first = (at[across[0]] if relative else None) or 1.0
        values = [at.get(x) for x in across]
        series[name] = [None if value is None else value / first for value in values]
    groups = [panel.labels.get(x, x) for x in across]
    plots.bars(axis, [textwrap.fill(x, 16) if wrap else x for x in groups], series, **panel.settings)
    panel.finish(axis)


def ranked(
    axis: Any, rows: Sequence[Row], panel: Panel, *, label: str, ordered: bool = False, color: int | None = None
) -> None:
    """Horizontal bars from top to bottom. label: a text. ordered: the shortest first. color: of all bars; by default
    each has its own.
    """
    if ordered:
        rows = sorted(rows, key=lambda row: float(row[panel.x]))
    colors = COLORS[: len(rows)] if color is None else COLORS[color]
    drawn = axis.barh(range(len(rows)), [row[panel.x] for row in rows], color=colors)
    axis.bar_label(drawn, [label.format_map(row) for row in rows], fontsize=8, padding=3)
    axis.set_yticks(range(len(rows)), [panel.name.format_map(row) for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.grid(alpha=0.3, axis="x")
    axis.set(xlim=(0, panel.room * max(row[panel.x] for row in rows)), **panel.settings)


def tiles(
    axis: Any, rows: Sequence[Row], panel: Panel, *, inputs: int, outputs: int, tile: tuple[int, int], color: int
) -> None:
    """Thread-block tiles on the first 256 rows of an output, an illustration; rows are not used."""
    height, width = tile
    down, across = math.ceil(inputs / height), math.ceil(outputs / width)
    style = {"facecolor": COLORS[color], "alpha": 0.35, "edgecolor": "#333", "linewidth": 0.4}
    for row, column in itertools.product(range(min(down, 256 // height)), range(across)):
        axis.add_patch(pyplot().Rectangle((column * width, row * height), width, height, **style))
    axis.set(xlim=(0, max(64, outputs)), ylim=(256, 0))
    axis.set_title(f"{panel.title}: {down * across} blocks of {height} x {width}", fontsize=8)
    axis.set_xlabel(f"outputs ({outputs})", fontsize=7)
    axis.set_ylabel(f"rows (256 of {inputs})", fontsize=7)
    axis.tick_params(labelsize=6)


def timeline(axis: Any, rows: Sequence[Row], panel: Panel, *, spans: Sequence[tuple[str, int, str]], note: str) -> None:
    """A bar for each row, with its note. spans: the column, the colour and the text of each part, one after another."""
    for line, row in enumerate(rows):
        start = 0.0
        for column, color, text in spans:
            width = row[column]
            axis.barh(line, width, left=start, color=COLORS[color], height=0.5, edgecolor="white")
            if text:
                style = {"ha": "center", "va": "center", "fontsize": 7, "color": "w"}
                axis.text(start + width / 2, line, f"{text}\n{width:.0f} ms", **style)
            start += width
        axis.text(0, line - 0.32, note.format_map(row), fontsize=8, va="bottom")
    axis.set_yticks(range(len(rows)), [textwrap.fill(panel.name.format_map(row), 22) for row in rows], fontsize=8)
    axis.set(ylim=(1.6, -0.7), **panel.settings)


def areas(axis: Any, rows: Sequence[Row], panel: Panel, *, curves: Mapping[str, tuple[str, str]]) -> None:
    """Stacked areas of the only row. x: a column with several values; y: one with the mean of all; curves: name and
    colour by column with values.
    """
    (row,) = rows
    shown = {column: style for column, style in curves.items() if any(row[column])}
    names, colors = zip(*shown.values(), strict=True)
    axis.stackplot(row[panel.x], [row[column] for column in shown], colors=colors, labels=names, step="mid")
    label = f"all windows: {row[panel.y]:.0f}"
    axis.axhline(row[panel.y], color="#c0504d", linewidth=1.2, linestyle="--", label=label)
    axis.set(**panel.settings)
    panel.finish(axis)


def table(axis: Any, rows: Sequence[Row], panel: Panel, *, columns: Mapping[str, str], widths: Sequence[float]) -> None:
    """The rows as text, those of the paper coloured. columns: a cell's text by header."""
    axis.axis("off")
    texts = [[form.format_map(row) for form in columns.values()] for row in rows]
    drawn = axis.table(texts, colLabels=list(columns), loc="center", cellLoc="left", colWidths=widths)
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(9)
    drawn.scale(1, 1.5)
    for (line, _), cell in drawn.get_celld().items():
        cell.set_edgecolor("#ccc")
        if line and rows[line - 1]["who"] == THE_PAPER:
            cell.set_facecolor("#fbeedd")


_KINDS: Mapping[str, Callable[..., None]] = {
    each.__name__: each for each in (lines, bars, ranked, tiles, timeline, areas, table)
}


def beside(facts: Sequence[Fact], here: Mapping[str, float | None], label: str, axis: Any) -> None:
    """The paper's numbers beside those measured here: grouped bars of facts with one unit."""
    groups = [textwrap.fill(fact.quantity, max(9, min(17, 66 // len(facts)))) for fact in facts]
    numbers: dict[str, list[float | None]] = {
        THE_PAPER: [fact.value for fact in facts],
        HERE: [here.get(fact.quantity) for fact in facts],
    }
    for place, (name, values) in enumerate(numbers.items()):
        at = [number + 0.4 * (place - 0.5) for number in range(len(facts))]
        drawn = axis.bar(at, [value or 0.0 for value in values], 0.38, color=_BESIDE[name], label=name)
        texts = ["n/a" if value is None else plots.short(value) for value in values]
        axis.bar_label(drawn, texts, fontsize=7, padding=1)
    plots.finish_bars(axis, groups, {"ylabel": label, "title": "beside the paper's numbers"})
    if len(groups) > 5:
        axis.tick_params(axis="x", labelsize=6)
