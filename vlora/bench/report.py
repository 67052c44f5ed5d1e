"""The common format of every bench: a table, and one JSON object on the last line."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


class Goal(NamedTuple):
    """A goal and its measurement: `value` must be at most (or at least) `goal`."""

    name: str
    value: float
    goal: float
    at_most: bool

    @property
    def holds(self) -> bool:
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def as_dict(self) -> dict[str, Any]:
        sign = "<=" if self.at_most else ">="
        return {"name": self.name, "value": round(self.value, 4), "goal": f"{sign} {self.goal:g}", "holds": self.holds}


@dataclasses.dataclass(frozen=True)
class Report:
    bench: str  # the bench's name
    rows: Sequence[Row]  # one mapping per measurement, all with the same keys
    goals: Sequence[Goal]  # the goals, with their values
    title: str | None = None  # the command, if it is not `vlora bench NAME`
    found: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # further values for the JSON, by name

    def print(self, *, only_json: bool = False) -> None:
        if not only_json:
            self._print_table()
        print(json.dumps(self.as_dict()))

    def _print_table(self) -> None:
        console = Console(width=170)
        table = Table(title=self.title or f"vlora bench {self.bench}")
        names = self.rows[0] if self.rows else ()
        columns = [name for name in names if not _is_curve(name, self.rows) and _has_values(name, self.rows)]
        for column in columns:
            table.add_column(column, justify="left" if isinstance(self.rows[0][column], str) else "right")
        for row in self.rows:
            table.add_row(*(_cell(row[column]) for column in columns))
        console.print(table)
        for goal in self.goals:
            stated = goal.as_dict()
            console.print(
                f"  {'holds' if goal.holds else 'FALLS SHORT'}: {goal.name}: {goal.value:.3f} ({stated['goal']})"
            )

    def as_dict(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "env": environment(),
            "rows": [dict(row) for row in self.rows],
            "goals": [goal.as_dict() for goal in self.goals],
            **self.found,
        }


def environment() -> dict[str, Any]:
    """Machine, versions, threads, commit: the context required to interpret a figure."""
    import torch

    from atmm.tuning.tables import device_name

    return {
        "machine": f"{platform.machine()} {_cpu_name()}, {device_name('cpu')}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in ("vlora", "torch", "transformers", "peft")},
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }


def version_of(distribution: str) -> str | None:
    """The installed version; None for a package that is not installed, as this one in a checkout may be."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_curve(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a column holds long or nested sequences, which are for plots."""
    lists = [row[name] for row in rows if isinstance(row[name], list)]
    return any(len(each) > 32 or any(isinstance(value, list) for value in each) for each in lists)


def _has_values(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(row[name] is not None for row in rows)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def commit() -> str | None:
    """Of the checkout; None outside a git repository."""
    return _git("rev-parse", "HEAD")


def age(commit: str | None) -> str:
    """A commit in short, and how far it is behind the checkout's."""
    if commit is None:
        return "unknown commit"
    behind = _git("rev-list", "--count", f"{commit}..HEAD")
    where = "not in this repository" if behind is None else f"{behind} commits behind HEAD"
    return f"commit {commit[:12]} ({where})"


def _git(*arguments: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


_HEAD = """# Results

The latest report of each benchmark and kind of machine, with the goals as they were when it ran; a value in bold misses
its goal. `vlora bench NAME --out DIR` (on a GPU `vlora gpu-check --out DIR`) makes a report and this page. The date is
in the name of the file, which has all measurements and the versions of packages.
"""


def page(folder: Path) -> str:
    """Markdown: a section for each report in `*.json` that has goals, in order of the file names."""
    reports = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return _HEAD + "".join(_section(name, report) for name, report in reports.items() if report.get("goals"))


def _section(name: str, report: Mapping[str, Any]) -> str:
    env = report["env"]
    where = [f"[{name}]({name})", f"threads: {env['threads']}", f"torch {env['versions']['torch']}", age(env["commit"])]
    if loads := [each["load"] for each in report.get("spent", {}).values() if "load" in each]:
        where.append(f"load {min(loads):g} to {max(loads):g}")
    lines = [f"\n## {report['bench']}: {env['gpu'] or env['machine']}", "", ", ".join(where), ""]
    for origin in report.get("origins", ()):
        if any(origin[key] != env[key] for key in ("commit", "machine", "gpu")):
            at = f"{age(origin['commit'])}, {origin['gpu'] or origin['machine']}"
            lines += [f"Measured before, at {at}: {', '.join(origin['results'])}.", ""]
    lines += ["| what | measured | goal |", "|---|---:|---:|"]
    for goal in report["goals"]:
        measured = f"{goal['value']:g}" if goal["holds"] else f"**{goal['value']:g}**"
        lines.append(f"| {goal['name']} | {measured} | {goal['goal']} |")
    return "\n".join(lines) + "\n"
