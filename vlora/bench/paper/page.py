"""The index page of the figures: one HTML file beside the pictures, without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from vlora.bench.paper.drawing import short
from vlora.bench.paper.drawn import Drawn
from vlora.bench.paper.figure import PAPERS, Elsewhere
from vlora.bench.report import Report


def write_page(path: Path, drawn: Sequence[Drawn], elsewhere: Sequence[Elsewhere], report: Report) -> None:
    """Write the page.

    Args:
        path: The file; pictures are in the same folder.
        drawn: The figures of this run.
        elsewhere: Those that need another machine.
        report: For the machine and the time.
    """
    environment = Environment(
        loader=PackageLoader("vlora.bench.paper", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["number"] = _number
    environment.filters["commit"] = _commit
    stated = report.as_dict()
    path.write_text(
        environment.get_template("page.html.j2").render(
            papers=PAPERS, drawn=drawn, elsewhere=elsewhere, env=stated["env"], found=report.found
        )
    )


def _number(value: float | None) -> str:
    return "n/a" if value is None else short(value)


def _commit(commit: str | None) -> str:
    return (commit or "unknown")[:12]
