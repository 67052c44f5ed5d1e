"""Plots of `vlora bench atmm`: latency against tokens, and the chosen strategies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

matplotlib.use("agg")

Row = Mapping[str, Any]
_OTHERS = (
    *("PEFT layer", "gather and bmm", "padded einsum", "plain loop"),  # on a CPU
    *("bgmv", "sgmv", "mbgmm", "vllm", "sglang", "einsum"),  # on a GPU
)
_STRATEGIES = "loop", "batched", "stacked", "gathered", "compiled", "tiled", "grouped", "divided"
_COLORS = {name: f"C{index}" for index, name in enumerate(_STRATEGIES)}


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Write latency.png and chosen.png."""
    _latency(rows, folder / "latency.png")
    _chosen(rows, folder / "chosen.png")


def _values(rows: Sequence[Row], name: str) -> list[Any]:
    return sorted({row[name] for row in rows})


def _latency(rows: Sequence[Row], path: Path) -> None:
    """A panel per layer and dtype, at the middle rank and the middle number of adapters; even segments."""
    rank, adapters = (found[len(found) // 2] for found in (_values(rows, "rank"), _values(rows, "adapters")))
    layers, dtypes = _values(rows, "layer"), _values(rows, "dtype")
    figure, panels = pyplot.subplots(
        len(dtypes), len(layers), figsize=(5 * len(layers), 3.6 * len(dtypes)), squeeze=False, sharex=True
    )
    for (line, dtype), (column, layer) in itertools.product(enumerate(dtypes), enumerate(layers)):
        panel = panels[line][column]
        shown = [
            row
            for row in rows
            if (row["layer"], row["dtype"], row["rank"], row["adapters"]) == (layer, dtype, rank, adapters)
            and row["segments"] == "even"
        ]
        tokens = [row["tokens"] for row in shown]
        panel.plot(tokens, [row["us"] for row in shown], "k-o", linewidth=2, label="chosen")
        for name in _OTHERS:
            known = [(row["tokens"], row["us"] * row[name]) for row in shown if row.get(name)]
            if known:
                panel.plot(*zip(*known, strict=True), "--", label=name)
        panel.set(xscale="log", yscale="log", title=f"{layer}, {dtype}", xlabel="tokens", ylabel="µs")
        panel.set_xticks(tokens, [str(count) for count in tokens], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    figure.suptitle(f"Deltas of {adapters} adapters of rank {rank}, one site")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _chosen(rows: Sequence[Row], path: Path) -> None:
    """A panel per layer, dtype and kind of segments: tokens across, rank and adapters down, colour is the strategy."""
    kinds = sorted({(row["layer"], row["dtype"], row["segments"]) for row in rows})
    tokens = _values(rows, "tokens")
    sizes = sorted({(row["rank"], row["adapters"]) for row in rows})
    columns = min(4, len(kinds))
    lines = -(-len(kinds) // columns)
    figure, panels = pyplot.subplots(
        lines,
        columns,
        figsize=(3.4 * columns, (0.26 * len(sizes) + 1.2) * lines + 0.8),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for panel, kind in itertools.zip_longest(panels.flat, kinds):
        if kind is None:
            panel.axis("off")
            continue
        for row in rows:
            if (row["layer"], row["dtype"], row["segments"]) == kind:
                place = tokens.index(row["tokens"]), sizes.index((row["rank"], row["adapters"]))
                panel.scatter(*place, marker="s", s=150, color=_COLORS[row["chosen"].split()[0]])
        panel.set_title(", ".join(kind), fontsize=9)
        panel.set_xticks(range(len(tokens)), [str(count) for count in tokens], fontsize=8)
        panel.set_yticks(range(len(sizes)), [f"rank {rank}, {count}" for rank, count in sizes], fontsize=7)
        panel.set(xlim=(-0.6, len(tokens) - 0.4), ylim=(-0.6, len(sizes) - 0.4))
    marks = [
        pyplot.Line2D([], [], marker="s", linestyle="", color=color, label=name) for name, color in _COLORS.items()
    ]
    figure.legend(handles=marks, loc="outside upper center", ncol=len(marks), frameon=False)
    figure.supxlabel("tokens")
    figure.supylabel("rank and adapters")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
