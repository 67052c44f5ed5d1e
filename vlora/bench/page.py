"""The page of a folder of reports: every goal, its measurement, and the machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HEAD = """# What was measured

`vlora bench --out` writes this page from the reports beside it: each promise as it stood when that bench last ran.
Bold is what falls short.
"""


def write_page(folder: Path) -> None:
    """Write FOLDER/README.md about the reports in it."""
    (folder / "README.md").write_text(page(folder))


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
