"""Benchmarks: each measures one goal against a named baseline. Only the command line imports this package."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlora.bench.page import write_page
from vlora.errors import BadConfig

if TYPE_CHECKING:
    from vlora.bench.report import Report

BENCHES = {
    "step": "engine.step",
    "prefill": "engine.prefill",
    "merge": "engine.merge",
    "atmm": "kernels.atmm",
    "costs": "scheduling.costs",
    "policy": "scheduling.policy",
    "memory": "engine.memory",
    "loading": "engine.loading",
    "reuse": "engine.reuse",
    "overload": "scheduling.overload",
    "cluster": "cluster.cluster",
    "heads": "engine.heads",
    "gateway": "serving.gateway",
    "serve": "serving.serve",
    "vision": "engine.vision",
    "soak": "serving.soak",
    "streams": "serving.streams",
    "tp": "tensor_parallel.tp",
    "split": "split.split",
    "packed": "training.packed",
    "training": "training.beside",
    "learning": "training.learning",
    "teachers": "engine.teachers",
}
"""Each bench's module in this package, with `run(quick) -> Report`. "all" runs them in this order."""


def main(name: str, quick: bool = False, out: Path | None = None, *, only_json: bool = False, **settings: Any) -> bool:
    """Run one bench, or "all", and print each report.

    Args:
        name: one of `BENCHES`, or "all".
        quick: run fewer and smaller cases.
        out: a folder for reports: `NAME.json` and, for benches with plots, `NAME/*.png`. A resumable bench keeps its
            intermediate results in `NAME.partial`.
        only_json: print no tables.
        settings: further arguments of the bench.

    Returns:
        Whether every goal is met.

    Raises:
        BadConfig: plots are requested but cannot be drawn.
    """
    if out is not None:
        require_matplotlib()
    holds = True
    for each in BENCHES if name == "all" else (name,):
        bench = importlib.import_module(f"vlora.bench.{BENCHES[each]}")
        if out is not None and getattr(bench, "GOES_ON", False):
            report = bench.run(quick, out / f"{each}.partial", **settings)
        else:
            report = bench.run(quick, **settings)
        report.print(only_json=only_json)
        if out is not None:
            draw = getattr(bench, "draw", None)
            save_report(report, None if draw is None else functools.partial(draw, report.rows), out)
        holds &= all(goal.holds for goal in report.goals)
        gc.collect()
    return holds


def require_matplotlib() -> None:
    """Check early that plots can be drawn.

    Raises:
        BadConfig: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BadConfig("--out needs matplotlib for its pictures; pip install 'vlora[bench]'")


def save_report(report: Report, draw: Callable[[Path], None] | None, out: Path) -> None:
    """Write OUT/NAME.json, the folder's page and, if the bench has plots, the plots into OUT/NAME."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{report.bench}.json").write_text(json.dumps(report.as_dict()) + "\n")
    write_page(out)
    if draw is not None:
        pictures = out / report.bench
        pictures.mkdir(exist_ok=True)
        draw(pictures)
