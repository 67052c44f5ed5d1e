"""`vlora bench cluster`: routing over many replicas, simulated with the live cluster's router.

The goals: Punica's rule needs few replicas (its figure 13), the default rule loads few adapters and answers early where
their popularity drifts (dLoRA's placement), throughput grows with the replicas (V-LoRA's table 3) and does not depend
on the number of adapters (S-LoRA), decisions and plans cost little CPU time, and large clusters can be simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlora.bench.cluster import consolidation, decisions, growing, placing, scale
from vlora.bench.report import Goal, Report


def run(quick: bool) -> Report:
    """Run all parts, on one core.

    Args:
        quick: Fewer requests, a quarter of an hour instead of an hour, a smaller cluster.
    """
    hour, drift, grown, decided, large = (
        part.rows(quick) for part in (consolidation, placing, growing, decisions, scale)
    )
    goals = [
        *consolidation.goals(hour),
        *placing.goals(drift),
        *growing.goals(grown),
        *decisions.goals(decided),
        *_scale_goals(large),
    ]
    return Report("cluster", [*hour, *drift, *grown, *decided, *large], goals)


def _scale_goals(found: Sequence[Mapping[str, Any]]) -> list[Goal]:
    size = f"{found[0]['N']} replicas, {found[0]['case']}"
    return [
        Goal(f"{size}, CPU s", max(each["CPU s"] for each in found), 120.0, at_most=True),
        Goal(f"{size}, MiB", max(each["MiB"] for each in found), 500.0, at_most=True),
    ]


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write hour.png, batches.png, placement.png, growing.png and decisions.png."""
    from vlora.bench.cluster import plots

    plots.draw(rows, folder)
