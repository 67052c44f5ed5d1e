"""Plot of `vlora bench streams`: cameras in real time by frame rate, number of tasks and kind of adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.ticker import NullLocator

matplotlib.use("agg")

_STYLES = {"ordinary": "o-", "activated": "s--"}


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write cameras.png: a panel for each number of threads, a line for each number of tasks and kind of adapters."""
    threads = sorted({row["threads"] for row in rows}, reverse=True)
    tasks = sorted({row["tasks"] for row in rows})
    highest = max(row["cameras"] for row in rows)
    figure, panels = pyplot.subplots(1, len(threads), figsize=(5 * len(threads), 4), squeeze=False, sharey=True)
    for panel, own in zip(panels[0], threads, strict=True):
        for place, number in enumerate(tasks):
            for kind, style in _STYLES.items():
                shown = [row for row in rows if (row["threads"], row["tasks"], row["adapters"]) == (own, number, kind)]
                if shown:
                    heads = f"{number} head{'s' * (number > 1)}, {kind}"
                    x, y = [row["fps"] for row in shown], [row["cameras"] for row in shown]
                    panel.plot(x, y, style, color=f"C{place}", label=heads)
        rates = sorted({row["fps"] for row in rows})
        panel.set(title=f"{own} engine thread{'s' * (own > 1)}", xlabel="frames per second of a camera", xscale="log")
        panel.set_yscale("symlog", linthresh=1, linscale=0.3)
        panel.set_ylim(0, 1.3 * max(1, highest))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        marks = [
            mark for mark in (0, 1, 2, 5, 10, 20, 50, 100, 200) if mark <= 1.5 * max(row["cameras"] for row in rows)
        ]
        panel.set_yticks(marks, [str(mark) for mark in marks])
        panel.yaxis.set_minor_locator(NullLocator())
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("cameras with p99 within 1 / fps, nothing dropped")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "cameras.png", dpi=110)
    pyplot.close(figure)
