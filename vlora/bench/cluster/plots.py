"""Plots of `vlora bench cluster`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from vlora.bench.cluster import consolidation, decisions, growing, placing
from vlora.routing import RULES

matplotlib.use("agg")

Row = Mapping[str, Any]
_COLORS = dict(zip(RULES, ("#1f6f9f", "#c0504d", "#c8a415", "#2f9e63", "#7f7f7f"), strict=True))
_SAMPLE_MIN = 10 / 60


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Write hour.png, batches.png, placement.png, growing.png and decisions.png."""
    hour = [row for row in rows if row["part"] == consolidation.PART and row["case"] == consolidation.MAIN]
    _hour(hour, folder / "hour.png")
    _batches([row for row in hour if row["rule"] in ("least_loaded", "punica")], folder / "batches.png")
    _placement(rows, folder / "placement.png")
    _growing(rows, folder / "growing.png")
    _decisions([row for row in rows if row["part"] == decisions.DECISIONS], folder / "decisions.png")


def _hour(rows: Sequence[Row], path: Path) -> None:
    """Replicas with requests over time, and requests of each of them."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for row in rows:
        minutes = [_SAMPLE_MIN * place for place in range(len(row["samples"]))]
        active = [sum(size > 0 for size in sizes) for sizes in row["samples"]]
        batch = [sum(sizes) / max(1, number) for sizes, number in zip(row["samples"], active, strict=True)]
        for panel, values in zip(panels, (active, batch), strict=True):
            panel.plot(minutes, _smooth(values), color=_COLORS[row["rule"]], label=row["rule"], linewidth=1.4)
    panels[0].set(title="replicas with requests", xlabel="minutes", ylim=(0, 16.5))
    panels[1].set(title="requests of each of these", xlabel="minutes", ylim=(0, 34))
    panels[1].axhline(32, color="#444", linewidth=0.8, linestyle=":")
    panels[1].text(0, 32.3, "a batch", fontsize=8, color="#444")
    for panel in panels:
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8, loc="center", bbox_to_anchor=(0.5, 0.55))
    figure.suptitle(
        f"Punica's figure 13, simulated: 16 replicas, {consolidation.MAIN} (means over a minute)", fontsize=11
    )
    _save(figure, path)


def _smooth(values: Sequence[float], number: int = 6) -> list[float]:
    """Moving averages."""
    return [sum(part) / len(part) for part in (values[max(0, i - number + 1) : i + 1] for i in range(len(values)))]


def _batches(rows: Sequence[Row], path: Path) -> None:
    """The requests of each replica over time, as in the lower panel of the paper's figure."""
    figure, panels = pyplot.subplots(1, len(rows), figsize=(10, 3.6), sharey=True, layout="constrained")
    for panel, row in zip(panels, rows, strict=True):
        by_replica = list(zip(*row["samples"], strict=True))
        end = _SAMPLE_MIN * len(row["samples"])
        shown = panel.imshow(
            by_replica, aspect="auto", origin="lower", extent=(0, end, -0.5, len(by_replica) - 0.5), vmin=0, vmax=32,
            cmap="magma_r", interpolation="nearest",
        )  # fmt: skip
        panel.set(title=row["rule"], xlabel="minutes")
    panels[0].set_ylabel("replica")
    figure.colorbar(shown, ax=panels, label="requests", shrink=0.9)
    figure.suptitle("Requests of each replica: Punica's rule leaves most of them idle", fontsize=11)
    _save(figure, path)


def _placement(rows: Sequence[Row], path: Path) -> None:
    """Loads and late first tokens by rule; then the variants of the default rule."""
    main = [row for row in rows if row["part"] == placing.PART]
    variants = [row for row in rows if row["part"] == placing.VARIANTS]
    cases = list(dict.fromkeys(row["case"] for row in main))
    figure, panels = pyplot.subplots(2, 2, figsize=(10.5, 6.8), layout="constrained", width_ratios=(1.25, 1))
    for place, (name, title) in enumerate((("loads", "adapter loads"), ("ttft p99 s", "first token, p99, s"))):
        panel = panels[place][0]
        for number, rule in enumerate(RULES):
            values = [row[name] for case in cases for row in main if row["rule"] == rule and row["case"] == case]
            at = [group + 0.16 * (number - 2) for group in range(len(cases))]
            bars = panel.bar(at, values, 0.15, color=_COLORS[rule], label=rule)
            panel.bar_label(bars, [_short(value) for value in values], size=6)
        panel.set_xticks(range(len(cases)), cases, fontsize=8)
        panel.set(title=title, yscale="log")
        panel.margins(y=0.15)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("")
        labels = [row["case"].partition("; ")[2] for row in variants]
        beside = panels[place][1]
        bars = beside.barh(labels, [row[name] for row in variants], color=_COLORS["placed"])
        beside.bar_label(bars, [_short(row[name]) for row in variants], fontsize=7, padding=2)
        beside.set_title(f"{title}; placed at {variants[0]['case'].partition(';')[0]}", fontsize=9)
        beside.tick_params(axis="y", labelsize=8)
        beside.margins(x=0.15)
        beside.invert_yaxis()
    panels[0][0].legend(fontsize=7, ncols=3, loc="upper left")
    panels[0][0].set_ylim(top=panels[0][0].get_ylim()[1] * 6)
    figure.suptitle("64 adapters of drifting popularity, 8 replicas with 12 places each (simulated)", fontsize=11)
    _save(figure, path)


def _short(value: float) -> str:
    """Two decimal places for seconds; numbers of loads in thousands."""
    if value >= 1000:
        return f"{value / 1000:.1f}k"
    return f"{value:.0f}" if value >= 50 else f"{value:.2f}"


def _growing(rows: Sequence[Row], path: Path) -> None:
    """Throughput by replicas beside the paper's; latency and loads by adapters."""
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    workers = [row for row in rows if row["part"] == growing.WORKERS]
    paper = [growing.PAPER[row["N"]] for row in workers]
    for place, (name, values) in enumerate(
        (("V-LoRA, table 3", paper), ("simulated", [row["req/s"] for row in workers]))
    ):
        at = [number + 0.4 * (place - 0.5) for number in range(len(workers))]
        bars = panels[0].bar(at, values, 0.38, label=name, color=("#d98c3f", "#1f6f9f")[place])
        panels[0].bar_label(bars, [f"{value:.1f}" for value in values], fontsize=8)
    panels[0].set_xticks(range(len(workers)), [f"{row['N']}" for row in workers])
    panels[0].set(title="requests/s by number of replicas", xlabel="replicas")
    panels[0].margins(y=0.12)
    panels[0].legend(fontsize=8)
    adapters = [row for row in rows if row["part"] == growing.ADAPTERS]
    for rule in dict.fromkeys(row["rule"] for row in adapters):
        own = [row for row in adapters if row["rule"] == rule]
        numbers = [int(row["case"].split()[0]) for row in own]
        for panel, name in zip(panels[1:], ("latency s", "loads"), strict=True):
            panel.plot(numbers, [row[name] for row in own], "o-", color=_COLORS[rule], label=rule)
            panel.set(xscale="log", xlabel="adapters")
    panels[1].set(title="mean latency, s", ylim=(0, None))
    panels[2].set(title="adapter loads", yscale="log")
    for panel in panels:
        panel.grid(alpha=0.3, axis="y")
        panel.set_axisbelow(True)
    panels[2].legend(fontsize=8)
    figure.suptitle("More replicas (V-LoRA), more adapters (S-LoRA; 16 replicas with 64 places each)", fontsize=11)
    _save(figure, path)


def _decisions(rows: Sequence[Row], path: Path) -> None:
    """CPU time of a decision by number of replicas."""
    figure, panel = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
    for rule in dict.fromkeys(row["rule"] for row in rows):
        own = [row for row in rows if row["rule"] == rule and "shares" not in row["case"]]
        replicas = [row["N"] for row in own]
        panel.plot(replicas, [row["p99 us"] for row in own], "o-", color=_COLORS[rule], label=f"{rule}, p99")
        panel.plot(replicas, [row["p50 us"] for row in own], "o:", color=_COLORS[rule], label=f"{rule}, p50")
    for row in rows:
        if "shares" in row["case"]:
            label = textwrap.fill("placed with shares of 8 tenants, p99", 24)
            panel.plot([row["N"]], [row["p99 us"]], "s", color=_COLORS[row["rule"]], label=label)
    panel.set(xscale="log", xlabel="replicas", ylabel="CPU time, us", ylim=(0, None))
    panel.set_title("A request ends, the first of 1,000 waiting is placed, another one arrives", fontsize=10)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
