"""Benches: each measures one promise against a named baseline. Nobody imports this room but the command line."""

from __future__ import annotations

import gc
import importlib

from vlora.errors import BadConfig

BENCHES = ("step", "merge", "atmm")


def main(name: str, quick: bool = False) -> bool:
    """Run one bench, or "all"; prints each report. Returns whether every goal holds. Raises BadConfig for other
    names."""
    if name != "all" and name not in BENCHES:
        raise BadConfig(f"no bench named {name!r}; choose one of {', '.join(BENCHES)} or all")
    holds = True
    for each in BENCHES if name == "all" else (name,):
        report = importlib.import_module(f"vlora.bench.{each}").run(quick)
        report.print()
        holds &= all(goal.holds for goal in report.goals)
        gc.collect()
    return holds
