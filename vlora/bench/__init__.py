"""Benchmarks: each measures one goal against a named baseline. Only the command line imports this package."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlora.errors import BadConfig

if TYPE_CHECKING:
    from vlora.bench.report import Report

_HEAD = """# What was measured

`vlora bench --out` writes this page from the reports beside it: each promise as it stood when that bench last ran.
Bold is what falls short.
"""


def page(folder: Path) -> str:
    """Markdown: a section for each report in `*.json` that has goals, in order of the file names."""
    reports = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return _HEAD + "".join(_section(name, report) for name, report in reports.items() if report.get("goals"))


def _section(name: str, report: Mapping[str, Any]) -> str:
    env = report["env"]
    versions = [f"{package} {version}" for package, version in env["versions"].items() if package != "vlora"]
    where = [
        f"[{name}]({name})",
        f"threads: {env['threads']}",
        *versions,
        f"commit {(env['commit'] or 'unknown')[:12]}",
    ]
    lines = [f"\n## {report['bench']}: {env['gpu'] or env['machine']}", "", ", ".join(where), ""]
    for origin in report.get("origins", ()):
        if any(origin[key] != env[key] for key in ("commit", "machine", "gpu")):
            at = f"commit {(origin['commit'] or 'unknown')[:12]}, {origin['gpu'] or origin['machine']}"
            lines += [f"Measured before, at {at}: {', '.join(origin['results'])}.", ""]
    lines += ["| what | measured | promised |", "|---|---:|---:|"]
    for goal in report["goals"]:
        measured = f"{goal['value']:g}" if goal["holds"] else f"**{goal['value']:g}**"
        lines.append(f"| {goal['name']} | {measured} | {goal['goal']} |")
    return "\n".join(lines) + "\n"


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
        draw = getattr(bench, "draw", None)
        holds &= finish(report, None if draw is None else functools.partial(draw, report.rows), out, only_json)
        gc.collect()
    return holds


def require_matplotlib() -> None:
    """Check early that plots can be drawn.

    Raises:
        BadConfig: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BadConfig("--out needs matplotlib for its pictures; pip install 'vlora[bench]'")


def finish(report: Report, draw: Callable[[Path], None] | None, out: Path | None, only_json: bool = False) -> bool:
    """Print a report; with `out`, write OUT/NAME.json, the folder's page and, if the bench has plots, OUT/NAME/*.png.

    Returns:
        Whether its goals are met.
    """
    report.print(only_json=only_json)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{report.bench}.json").write_text(json.dumps(report.as_dict()) + "\n")
        (out / "README.md").write_text(page(out))
        if draw is not None:
            pictures = out / report.bench
            pictures.mkdir(exist_ok=True)
            draw(pictures)
    return all(goal.holds for goal in report.goals)
