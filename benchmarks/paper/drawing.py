"""Parts that figures share: colours, bars of the paper's numbers beside ours, and saving with a caption."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.figure import PAPERS, Fact, Figure, Found, Panel
from benchmarks.paper.measuring import Setting
from vlora.bench import plots
from vlora.bench.plots import COLORS, pyplot

HERE, PAPER = "#1f6f9f", "#d98c3f"
_CAPTION_WIDTH = 17  # characters per inch


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
    drawn = list(figure.panels(found))
    if figure.beside is not None:
        drawn.append(beside(figure.facts, figure.here(found), ylabel=figure.beside))
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


def lines(
    curves: Mapping[str, Sequence[float | None]],
    across: Sequence[float],
    *,
    ticked: bool = False,
    log: bool = False,
    legend: float = 8,
    **settings: Any,
) -> Panel:
    """A panel with a line for each entry of `curves` over `across`.

    Args:
        curves: Values by name, None where there is none.
        across: Of the x axis.
        ticked: Whether the x axis is logarithmic and has ticks at the values of `across` only.
        log: Whether the y axis is logarithmic.
        legend: Its size of letters.
        settings: Further ones of the axis.
    """

    def draw(axis: Any) -> None:
        plots.lines(axis, curves, across, **settings)
        axis.legend(fontsize=legend)
        if ticked:
            plots.ticks(axis, across)
        if log:
            log_values(axis)

    return draw


def bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    log: float = 0,
    legend: Mapping[str, Any] = {},
    **settings: Any,
) -> Panel:
    """A panel of grouped bars, each with its value.

    Args:
        groups: Their labels.
        series: A value for each group by name.
        log: If not 0, the y axis is logarithmic, with this many times its height above as room for the legend.
        legend: Its settings.
        settings: Further ones of the axis.
    """

    def draw(axis: Any) -> None:
        plots.bars(axis, groups, series, **settings)
        if log:
            axis.set_yscale("log")
            axis.set_ylim(top=log * axis.get_ylim()[1])
            log_values(axis)
        axis.legend(**{"fontsize": 8, **legend})

    return draw


def beside(facts: Sequence[Fact], here: Mapping[str, float | None], ylabel: str) -> Panel:
    """A panel of the paper's numbers beside those measured here: grouped bars of facts with one unit."""

    def draw(axis: Any) -> None:
        groups = [textwrap.fill(fact.quantity, max(9, min(17, 66 // len(facts)))) for fact in facts]
        series: tuple[tuple[str, str, list[float | None]], ...] = (
            ("the paper", PAPER, [fact.value for fact in facts]),
            ("here", HERE, [here.get(fact.quantity) for fact in facts]),
        )
        for place, (name, color, values) in enumerate(series):
            at = [number + 0.4 * (place - 0.5) for number in range(len(facts))]
            drawn = axis.bar(at, [value or 0.0 for value in values], 0.38, color=color, label=name)
            axis.bar_label(
                drawn, ["n/a" if value is None else plots.short(value) for value in values], fontsize=7, padding=1
            )
        plots.finish_bars(axis, groups, {"ylabel": ylabel, "title": "beside the paper's numbers"})
        if len(groups) > 5:
            axis.tick_params(axis="x", labelsize=6)

    return draw


def horizontal_bars(axis: Any, values: Mapping[str, float], labels: Sequence[str], colors: Sequence[str]) -> None:
    """Bars from top to bottom, each with a label."""
    drawn = axis.barh(range(len(values)), list(values.values()), color=colors)
    axis.bar_label(drawn, labels, fontsize=8, padding=3)
    axis.set_yticks(range(len(values)), list(values), fontsize=8)
    axis.invert_yaxis()


def log_values(axis: Any) -> None:
    """A logarithmic y axis with plain numbers."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}" if high < 30 * low else "")
    axis.tick_params(axis="y", which="minor", labelsize=7)


def wrapped(name: str) -> str:
    """A label in lines short enough for a group of bars."""
    return textwrap.fill(name, 16)


def rectangle(x: float, y: float, width: float, height: float, color: int) -> Any:
    """A tile with an edge."""
    return pyplot().Rectangle(
        (x, y), width, height, facecolor=COLORS[color], alpha=0.35, edgecolor="#333", linewidth=0.4
    )
