"""`python -m tests.hub`: measure every checkpoint of the hub and write the table of docs/hub-checkpoints.md.

`python -m tests.hub make NAME FOLDER [SAVED_BY]` writes one checkpoint; `python -m tests.hub list` lists them.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from click.testing import CliRunner

from tests.fusion.made import picture, write_plan
from tests.hub.checkpoints import NAMES, make, savers
from tests.hub.law import EQUAL, KINDS, Served
from vlora.cli import cli
from vlora.errors import VLoraError

PAGE = Path(__file__).parents[2] / "docs" / "hub-checkpoints.md"
COLUMNS = ("check", *KINDS, "fuse --check")
_BEGIN, _END = "<!-- made by python -m tests.hub -->", "<!-- end -->"


def row(name: str, folder: Path, reasons: list[str]) -> list[str]:
    """The cells of a checkpoint as published. reasons: of refusals, numbered in the order in which they are met."""
    served = Served.make(name, "hub", folder)

    def cell(text: str) -> str:
        if not text.startswith("refused: "):
            return text if text in (EQUAL, "complete") else "differs"
        reason = re.sub(r"'?/\S+?/(model|plan.yaml)'?(?=[ ,:])", r"\1", text.removeprefix("refused: ")).split(". ")[0]
        if reason not in reasons:
            reasons.append(reason)
        return f"refused ({reasons.index(reason) + 1})"

    try:
        found = [cell("; ".join(served.check().problems) or "complete")]
    except VLoraError as error:
        return [cell(f"refused: {error}"), *["-"] * len(KINDS), cell(_fuse(served.folder, folder))]
    found += [cell(served.answer(kind)) for kind in KINDS]
    return [*found, cell(_fuse(served.folder, folder))]


def _fuse(model: Path, folder: Path) -> str:
    """`vlora fuse --check` of a plan with pictures of two classes on this base."""
    for place, label in enumerate(("cat", "dog")):
        for number in range(20):
            picture(folder / "pictures" / label / f"{number}.png", 100 * place + number)
    plan = write_plan(folder, "data: {format: image_folder, path: pictures}", more=f"base: {model}\n")
    result = CliRunner().invoke(cli, ["fuse", str(plan), "--check"])
    if result.exit_code == 0:
        return "complete"
    return f"refused: {result.exception or result.output}"


def write_table() -> None:
    reasons: list[str] = []
    lines = [f"| checkpoint | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            cells = row(name, Path(folder), reasons)
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    table = "\n".join([*lines, "", *(f"{place}. {text}" for place, text in enumerate(reasons, 1))])
    before, rest = PAGE.read_text().split(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{rest.split(_END)[1]}")


match sys.argv[1:]:
    case ["make", name, folder, *saved_by]:
        make(name, Path(folder), *saved_by)  # type: ignore[arg-type]
    case ["list"]:
        for name in NAMES:
            print(name, *savers(name))
    case []:
        write_table()
    case _:
        sys.exit(__doc__)
