"""The plot of `vlora bench learning`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes

matplotlib.use("agg")

Row = Mapping[str, Any]
WINDOW = 30  # pictures of a moving average
_COLORS = {
    "training": "#7f7f7f",
    "evaluated": "#c8a415",
    "promoted": "#2f9e63",
    "rolled_back": "#c0504d",
}
_SHADES = ("#f2f4f7", "#ffffff")


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Write accuracy.png: moving averages of both runs over time, with the phases and what was decided."""
    runs = list(dict.fromkeys(row["run"] for row in rows))
    figure, panels = pyplot.subplots(len(runs), 1, figsize=(11, 3.6 * len(runs)), layout="constrained", squeeze=False)
    for panel, run in zip(panels[:, 0], runs, strict=True):
        _draw_run(panel, [row for row in rows if row["run"] == run])
        panel.set(title=f"{run}: accuracy of the cameras' answers, mean over {WINDOW} pictures", ylabel="accuracy")
    panels[-1, 0].set(xlabel="processor seconds")
    figure.savefig(folder / "accuracy.png", dpi=130)
    pyplot.close(figure)


def _draw_run(panel: Axes, rows: Sequence[Row]) -> None:
    answers = [answer for row in rows for answer in row["answers"]]
    rights = [right for _, right in answers]
    means = [sum(part) / len(part) for part in (rights[max(0, i - WINDOW + 1) : i + 1] for i in range(len(rights)))]
    panel.plot([at for at, _ in answers], means, color="#1f6f9f", linewidth=1.6)
    for number, row in enumerate(rows):
        end = rows[number + 1]["from, s"] if number + 1 < len(rows) else row["to, s"]
        panel.axvspan(row["from, s"], end, color=_SHADES[number % 2], zorder=0)
        name = f"{row['phase']}\n{row['accuracy']:.2f}"
        # Neighbours may be short: their names are at different heights.
        panel.text((row["from, s"] + end) / 2, 1.42 - 0.12 * (number % 3), name, fontsize=7.5, ha="center", va="top")
    shown = set()
    for row in rows:
        for at, event, _ in row["events"]:
            if event in _COLORS:
                label = event.replace("_", " ") if event not in shown else None
                panel.axvline(at, color=_COLORS[event], linewidth=1.3, linestyle="--", label=label)
                shown.add(event)
    panel.set(ylim=(0, 1.44), yticks=[0, 0.2, 0.4, 0.6, 0.8, 1])
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.4))
