"""The pictures of all benchmarks: a few kinds of plot, each drawn from rows."""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlora.bench.report import Row
from vlora.run_folder import whole

COLORS = ("#1f6f9f", "#2f9e63", "#c0504d", "#8064a2", "#7f7f7f", "#c8a415", "#17a2b8", "#e377c2")
_MAX_HORIZONTAL_LABELS = 15  # of the bars of a panel; more would overlap, so they are vertical
_CAPTION_WIDTH = 17  # characters per inch


def select(rows: Sequence[Row], wanted: Mapping[str, Any]) -> Sequence[Row]:
    """The rows with these values of columns, None without one. A list stands for any of its values, "last" for the
    value of the last row.
    """
    for column, value in wanted.items():
        if value == "last":
            value = next((row[column] for row in reversed(rows) if column in row), None)
        values = value if isinstance(value, list) else [value]
        rows = [row for row in rows if row.get(column) in values]
    return rows


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


class Picture(NamedTuple):
    """Panels from left to right, line by line.

    Attributes:
        rows: Of the report.
        panels: Arguments of `Panel`.
        size: Width and height in inches; by the number of panels by default.
        widths: Of the panels of a line, relative to each other; equal by default.
        lines: Of panels; by their number by default.
        caption: Below the panels.
    """

    rows: Sequence[Row]
    panels: Sequence[Mapping[str, Any]]
    title: str = ""
    size: tuple[float, float] | None = None
    widths: Sequence[float] | None = None
    lines: int | None = None
    caption: str = ""

    def save(self, path: Path) -> None:
        """Write it as PNG, unless there are no rows to draw."""
        if not (drawn := self._drawn()):
            return
        lines, across = self._grid(len(drawn))
        width, height = self.size or (1.5 + 3.9 * across, 0.6 + 3.6 * lines)
        text = textwrap.fill(self.caption, int(width * _CAPTION_WIDTH / 1.12))
        extra = 0.19 * (text.count("\n") + 1) + 0.12 if text else 0.0
        canvas = pyplot().figure(figsize=(width, height + extra), layout="constrained")
        bottom = extra / (height + extra)
        canvas.get_layout_engine().set(rect=(0, bottom, 1, 1 - bottom))  # type: ignore[union-attr,call-arg]
        self.draw(canvas)
        canvas.suptitle(self.title, fontsize=12)
        canvas.text(0.012, 0.012, text, fontsize=8, color="#444", va="bottom", linespacing=1.25)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path, durable=False) as part:
            canvas.savefig(part, dpi=100, format="png")
        pyplot().close(canvas)

    def draw(self, canvas: Any) -> None:
        drawn = self._drawn()
        grid = canvas.subplots(*self._grid(len(drawn)), squeeze=False, width_ratios=self.widths)
        for panel, axis in itertools.zip_longest(drawn, grid.flat):
            axis.axis("off") if panel is None else panel(axis)

    def _drawn(self) -> list[Callable[[Any], None]]:
        return [each for stated in self.panels for each in _panels(self.rows, Panel(**stated))]

    def _grid(self, count: int) -> tuple[int, int]:
        lines = self.lines or -(-count // 4)
        return lines, -(-count // lines)


class Panel(NamedTuple):
    """A panel of a figure. Texts have values of a row as {column}.

    Attributes:
        kind: Of the plot: a key of `_KINDS`.
        rows: In place of the picture's.
        where: Which rows.
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
    rows: Sequence[Row] | None = None
    where: Mapping[str, Any] = {}
    each: Sequence[str] = ()
    columns: Mapping[str, str] = {}
    title: str = ""
    x: str = ""
    y: str = ""
    name: str = "here"
    series: Sequence[Mapping[str, Any]] = ({},)
    labels: Mapping[str, str] = {}
    ticked: bool = False
    log: str = ""
    room: float = 1.0
    legend: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}

    def points(self, rows: Sequence[Row]) -> list[tuple[str, Any, Any]]:
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
    rows = select(rows if panel.rows is None else panel.rows, panel.where)
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
    error: str = "",
    note: str = "",
) -> None:
    """A line for each series.

    Args:
        styles: Of lines by name of their series.
        mark: A vertical line, and its text.
        error: A column, half the length of a bar at each point.
        note: A text at each point: of the first series above, of the second below it.
    """
    points = panel.points(rows)
    names = list(dict.fromkeys(name for name, _, _ in points))
    for place, name in enumerate(names):
        known = [(x, y) for own, x, y in points if own == name and y is not None]
        width = max(1.2, 3.2 - 0.9 * place)  # a line under another one remains visible
        style = {"color": COLORS[place % len(COLORS)], "label": name, "markersize": 4, "linewidth": width}
        dots = "o-" if len(known) < 50 else "-"
        (line,) = axis.plot([x for x, _ in known], [y for _, y in known], dots, **style)
        line.set(**styles.get(name, {}))
    axis.set(**panel.settings)
    axis.grid(alpha=0.3)
    for row in rows if error else ():
        color = COLORS[names.index(panel.name.format_map(row))]
        axis.errorbar(row[panel.x], row[panel.y], row[error], color=color, capsize=3)
    for place, row in enumerate(rows if note else ()):
        line = names.index(panel.name.format_map(row))
        offset = (0, -14 - 10 * (place % 2) if line else 7)
        style = {"fontsize": 7, "color": COLORS[line], "ha": "center"}
        axis.annotate(
            note.format_map(row), (row[panel.x], row[panel.y]), xytext=offset, textcoords="offset points", **style
        )
    if panel.ticked:
        axis.set_xscale("log")
        axis.set_xticks(values := sorted({x for _, x, _ in points}), [f"{x:g}" for x in values], minor=False)
        axis.minorticks_off()
    if mark is not None:
        axis.axvline(mark[0], color="#999", linestyle=":")
        style = {"transform": axis.get_xaxis_transform(), "fontsize": 8, "color": "#666", "ha": "right"}
        axis.text(mark[0], 0.95, f"{mark[1]} ", **style)
    panel.finish(axis)


def bars(
    axis: Any,
    rows: Sequence[Row],
    panel: Panel,
    *,
    relative: bool = False,
    wrap: int = 0,
    colors: Sequence[str] = COLORS,
    missing: str = "",
) -> None:
    """Bars with their values, in a group for each x.

    Args:
        relative: To the series' first.
        wrap: Letters of a line of the groups' labels; 0: as they are.
        colors: Of the series.
        missing: The label of a bar without a value.
    """
    points = panel.points(rows)
    across: list[Any] = list(dict.fromkeys(x for _, x, _ in points))
    names = list(dict.fromkeys(name for name, _, _ in points))
    width, upright = 0.8 / len(names), len(across) * len(names) > _MAX_HORIZONTAL_LABELS
    for place, name in enumerate(names):
        at = {x: y for own, x, y in points if own == name and y is not None}
        first = at[across[0]] if relative else 1.0
        values = [at[x] / first if x in at else None for x in across]
        middles = [number + width * (place - (len(names) - 1) / 2) for number in range(len(across))]
        color = colors[place % len(colors)]
        drawn = axis.bar(middles, [value or 0.0 for value in values], width * 0.94, color=color, label=name)
        texts = [missing if value is None else short(value) for value in values]
        axis.bar_label(drawn, texts, fontsize=7, padding=1, rotation=90 if upright else 0)
    groups = [panel.labels.get(x, x) for x in across]
    groups = [textwrap.fill(x, wrap) for x in groups] if wrap else groups
    turned = sum(max(map(len, x.split("\n"))) for x in groups) > 80  # letters that fit side by side
    size = 8 if len(groups) < 5 else 7
    axis.set_xticks(range(len(groups)), groups, fontsize=size, rotation=25 if turned else 0)
    axis.set(**panel.settings)
    axis.grid(alpha=0.3, axis="y")
    axis.set_axisbelow(True)
    axis.margins(y=0.15)
    panel.finish(axis)


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
    """The rows as text, those of a paper coloured. columns: a cell's text by header."""
    axis.axis("off")
    texts = [[form.format_map(row) for form in columns.values()] for row in rows]
    drawn = axis.table(texts, colLabels=list(columns), loc="center", cellLoc="left", colWidths=widths)
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(9)
    drawn.scale(1, 1.5)
    for (line, _), cell in drawn.get_celld().items():
        cell.set_edgecolor("#ccc")
        if line and rows[line - 1]["who"] == "the paper":
            cell.set_facecolor("#fbeedd")


def cells(axis: Any, rows: Sequence[Row], panel: Panel) -> None:
    """A cell for each x and y in the colour of its series."""
    points = panel.points(rows)
    across, down = sorted({x for _, x, _ in points}), sorted({y for _, _, y in points})
    for number, name in enumerate(sorted({name for name, _, _ in points})):
        at = [(across.index(x), down.index(y)) for own, x, y in points if own == name]
        axis.scatter(*zip(*at, strict=True), marker="s", s=150, color=COLORS[number % len(COLORS)], label=name)
    axis.set_xticks(range(len(across)), [str(x) for x in across], fontsize=8)
    axis.set_yticks(range(len(down)), [str(y) for y in down], fontsize=7)
    axis.set(xlim=(-0.6, len(across) - 0.4), ylim=(-0.6, len(down) - 0.4), xlabel=panel.x, **panel.settings)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=3)


_KINDS: Mapping[str, Callable[..., None]] = {
    each.__name__: each for each in (lines, bars, timeline, areas, table, cells)
}


def short(value: float) -> str:
    """A number with three digits, without an exponent."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
