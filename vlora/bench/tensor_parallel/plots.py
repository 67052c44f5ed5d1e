"""Plots of `vlora bench tp`: BD-LoRA's figure 5, a column for each latency, and the fastest kind."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

matplotlib.use("agg")

Row = Mapping[str, Any]
_COLORS = {"replicated": "C2", "slora": "C0", "bd": "C1"}  # as in the paper
_LEVEL = 1.05  # relative to the fastest; up to here a kind counts as equally fast


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Write curves.png and wins.png."""
    _curves(rows, folder / "curves.png")
    _wins(rows, folder / "wins.png")


def _steps(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Phase and batch of every kind of step."""
    return list(dict.fromkeys((row["phase"], row["batch"]) for row in rows))


def _curves(rows: Sequence[Row], path: Path) -> None:
    """Milliseconds of a step against the rank of the dense kinds; `bd` has the same number of parameters."""
    steps, latencies = _steps(rows), sorted({row["latency us"] for row in rows})
    figure, panels = pyplot.subplots(
        len(steps), len(latencies), figsize=(4 * len(latencies), 3.2 * len(steps)), squeeze=False, sharey="row"
    )
    for (line, step), (column, latency) in itertools.product(enumerate(steps), enumerate(latencies)):
        panel = panels[line][column]
        shown = [row for row in rows if (row["phase"], row["batch"], row["latency us"]) == (*step, latency)]
        ranks = [row["rank"] for row in shown]
        panel.plot(ranks, [row["base ms"] for row in shown], "k--", label="no adapter")
        for kind, color in _COLORS.items():
            panel.plot(ranks, [row["base ms"] * row[f"{kind} / base"] for row in shown], "-o", color=color, label=kind)
        panel.set(xscale="log", title=f"{step[0]}, batch {step[1]}, +{latency} µs", xlabel="rank (of dense factors)")
        panel.set_xticks(ranks, [str(rank) for rank in ranks], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        if column == 0:
            panel.set_ylabel("ms a step")
    for row_of_panels in panels:
        row_of_panels[0].set_ylim(bottom=0)  # last, because a fixed limit disables autoscaling of the other one
    panels[0][0].legend(fontsize=8)
    figure.suptitle("Step time by adapter layout on ranks; µs: injected into every collective")
    _save(figure, path)


def _wins(rows: Sequence[Row], path: Path) -> None:
    """A panel for each kind of step: the fastest kinds by rank and latency, the time of split relative to replicated
    factors, and the rank from which they are predicted to be faster.
    """
    steps, latencies = _steps(rows), sorted({row["latency us"] for row in rows})
    figure, panels = pyplot.subplots(1, len(steps), figsize=(5 * len(steps), 1.6 + len(latencies)), squeeze=False)
    for panel, step in zip(panels[0], steps, strict=True):
        shown = [row for row in rows if (row["phase"], row["batch"]) == step]
        ranks = sorted({row["rank"] for row in shown})
        for row in shown:
            times = {kind: row[f"{kind} / base"] for kind in _COLORS}
            level = [kind for kind in _COLORS if times[kind] <= _LEVEL * min(times.values())]
            place = ranks.index(row["rank"]), latencies.index(row["latency us"])
            for number, kind in enumerate(level):
                width = 0.94 / len(level)
                left = place[0] - 0.47 + number * width, place[1] - 0.44
                panel.add_patch(pyplot.Rectangle(left, width, 0.88, color=_COLORS[kind], alpha=0.4, linewidth=0))
            label = "\n= ".join(level) + f"\n\nslora / replicated\n{row['slora / replicated']:.2f}"
            panel.text(*place, label, ha="center", va="center", fontsize=7)
        panel.set(title=f"{step[0]}, batch {step[1]}", xlabel="rank (of dense factors)")
        panel.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
        panel.set_yticks(range(len(latencies)), [f"+{latency} µs" for latency in latencies], fontsize=8)
        panel.set_xlim(-0.5, len(ranks) - 0.5)
        panel.set_ylim(-0.5, len(latencies) - 0.5)
    figure.suptitle("The fastest kind, and those within 5 % of it")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
