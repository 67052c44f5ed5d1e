"""Plots of `vlora bench policy`: average token latency by load, by skewness and by number of adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from vlora.config import POLICY_ALIASES
from vlora.orchestrator import POLICIES

matplotlib.use("agg")

Row = Mapping[str, Any]
_FORMER_NAMES = {name: alias for alias, name in POLICY_ALIASES.items()}


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Write load.png, skew.png and adapters.png for retrieval, video.png for video."""
    retrieval = [row for row in rows if row["app"] == "retrieval"]
    _panels(retrieval, "load", ["skew"], folder / "load.png", adapters=_middle(retrieval, "adapters"))
    _panels(retrieval, "skew", ["load"], folder / "skew.png", adapters=_middle(retrieval, "adapters"))
    _panels(retrieval, "adapters", ["load"], folder / "adapters.png", skew=_middle(retrieval, "skew"))
    video = [row for row in rows if row["app"] == "video"]
    _panels(video, "load", ["streams", "adapters"], folder / "video.png")


def _latency_ms(row: Row, policy: str) -> float:
    """A row's value for a policy; reports of earlier releases have its former name."""
    value: float = row[policy if policy in row else _FORMER_NAMES[policy]]
    return value


def _middle(rows: Sequence[Row], name: str) -> Any:
    found = sorted({row[name] for row in rows})
    return found[len(found) // 2]


def _panels(rows: Sequence[Row], across: str, panel_by: Sequence[str], path: Path, **fixed: Any) -> None:
    """A panel for each combination of values of `panel_by`, a line for each policy, `across` on the x axis."""
    rows = [row for row in rows if all(row[name] == value for name, value in fixed.items())]
    by_panel: dict[tuple[float, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row[across]):
        by_panel.setdefault(tuple(row[name] for name in panel_by), []).append(row)
    values = sorted(by_panel)
    figure, panels = pyplot.subplots(1, len(values), figsize=(3.4 * len(values) + 1, 3.6), squeeze=False, sharey=True)
    for panel, value in zip(panels[0], values, strict=True):
        shown = by_panel[value]
        for place, policy in enumerate(POLICIES):
            panel.plot(
                [row[across] for row in shown],
                [_latency_ms(row, policy) for row in shown],
                "o-",
                color=f"C{place}",
                label=policy,
            )
        title = ", ".join(f"{name} {each:g}" for name, each in zip(panel_by, value, strict=True))
        panel.set(title=title, xlabel=across, yscale="log")
        if across == "adapters":
            panel.set_xscale("log")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("average token latency, ms")
    panels[0][0].legend(fontsize=8)
    figure.suptitle(", ".join(f"{name} {value:g}" for name, value in fixed.items()))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
