"""The sizes of all folders, and of the functions with which `Engine.step` decides, runs and records.

    python -m tests.core_size

`executed` counts the functions of `vlora` that the steps of `examples/minimal_engine.py` enter, with their docstrings
and comments, without those of `EXCLUDED`. The example serves the base model and an adapter, text with a picture,
unmerged, mixed and merged. docs/limits.md has the figure. Commit 8242a2a has 2,745. The goal is at most 3,000.
"""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
_READING_S = 1e-3  # between two readings of the clock

EXCLUDED = {
    "vlora.parallel": "tensor parallelism",
    "vlora.engine.grammar_cache": "grammars",
    "vlora.engine.monitor": "monitoring",
    "vlora.orchestrator.stats": "monitoring",
    "vlora.engine.request_checks": "answers that other engines began, which step only polls",
    "vlora.engine.adapter_admin": "the operator's adapter changes, which step only polls",
    "vlora.models.processing": "the front end's image processor and tokenizer",
}
"""Packages and modules whose functions a step enters, and which are not part of the core, with the reason."""


class Budget(NamedTuple):
    """Lines of Python, tests apart. most: what the folders may have now, which only goes down. target: the aim."""

    folders: str
    most: int
    target: int


BUDGETS = (
    Budget("vlora vlora/types vlora/plan_files vlora/wording", 3_690, 2_200),
    Budget("vlora/client", 1_890, 900),
    Budget("vlora/server", 9_770, 4_900),
    Budget("vlora/engine vlora/parallel", 6_550, 4_900),
    Budget("vlora/orchestrator vlora/routing", 5_420, 4_000),
    Budget("vlora/memory vlora/lora vlora/models", 12_010, 8_300),
    Budget("vlora/cluster", 7_020, 3_700),
    Budget("vlora/wire", 920, 1_000),
    Budget("vlora/split", 2_500, 1_600),
    Budget("vlora/training vlora/learning fusion/training", 7_150, 4_500),
    Budget("vlora/simulator", 2_140, 1_500),
    Budget("vlora/cli", 3_420, 2_600),
    Budget("vlora/bench", 4_250, 2_500),
    Budget("benchmarks", 8_000, 6_500),
    Budget("fusion", 9_370, 6_200),
    Budget("tools", 850, 800),
    Budget("atmm apps heads", 13_600, 10_500),
)
"""Each file counts for the longest folder that it is in."""

MAX_SINGLE_IMPORTERS = 112
"""Modules that only one other module imports: most of them would be easier to find as a part of it."""


def executed() -> dict[str, int]:
    """Lines of the functions that the steps of the minimal engine enter, by module of `vlora`.

    A function's lines include its decorators, docstring and comments. Reading adapters does not count, and is done
    between two steps. The engine's clock and that of a step's work count their readings, so that the modes of the steps
    do not depend on the machine.
    """
    from examples import minimal_engine
    from tests.queued_executor import QueuedExecutor
    from vlora.engine import Engine
    from vlora.models.launched_step import HostClock

    entered: set[tuple[str, int]] = set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    step = Engine.step

    executor = QueuedExecutor()

    def recorded_step(engine: Engine) -> Any:
        while executor.run():
            pass
        sys.setprofile(record)
        try:
            return step(engine)
        finally:
            sys.setprofile(None)

    readings = itertools.count()

    def clock(*_: Any) -> float:
        return next(readings) * _READING_S

    with (
        mock.patch.object(HostClock, "mark", clock),
        mock.patch.object(Engine, "step", recorded_step),
        mock.patch.object(
            minimal_engine,
            "Engine",
            functools.partial(Engine, executor=executor, clock=lambda: next(readings) * _READING_S),
        ),
    ):
        minimal_engine.run()
    found: dict[str, int] = {}
    for file in {file for file, _ in entered if Path(file).is_relative_to(ROOT / "vlora")}:
        module = ".".join(Path(file).relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not is_within(module):
            found[module] = _function_lines(Path(file), {line for its, line in entered if its == file})
    return found


def _function_lines(file: Path, entered: set[int]) -> int:
    """The number of lines of the functions that start at one of these lines; nested functions count once."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            if first in entered:
                lines.update(range(first, (node.end_lineno or first) + 1))
    return len(lines)


def lines_by_budget() -> dict[str, int]:
    """Lines of each budget's folders."""
    found = dict.fromkeys((budget.folders for budget in BUDGETS), 0)
    owner = {folder: budget.folders for budget in BUDGETS for folder in budget.folders.split()}
    for path in product_files():
        parents = (str(parent) for parent in path.relative_to(ROOT).parents)
        found[owner[next(parent for parent in parents if parent in owner)]] += path.read_text().count("\n")
    return found


def single_importers() -> list[str]:
    """Modules that exactly one other module imports. Packages, which name their parts, do not count."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in product_files()}
    counts = collections.Counter(
        name for module, path in files.items() for name in {*_all_imports(ast.parse(path.read_text()))} - {module}
    )
    return sorted(module for module in files if counts[module] == 1)


def product_files() -> list[Path]:
    """Files of Python, tests apart."""
    tops = {folder.split("/")[0] for budget in BUDGETS for folder in budget.folders.split()}
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def _all_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(module: str) -> bool:
    """Whether a module is excluded, or in an excluded package."""
    return any(module == package or module.startswith(package + ".") for package in EXCLUDED)


def file_of(module: str) -> Path:
    """The file of a module of the project."""
    path = ROOT.joinpath(*module.split("."))
    package = path / "__init__.py"  # a folder alone may be left over, with bytecode
    return package if package.exists() else path.with_suffix(".py")


def main() -> None:
    folders = lines_by_budget()
    for budget in BUDGETS:
        print(f"{budget.folders:52}{folders[budget.folders]:8,} lines, most {budget.most:,}, target {budget.target:,}")
    print(f"{'sum':52}{sum(folders.values()):8,} lines, target {sum(budget.target for budget in BUDGETS):,}")
    print(f"{'modules with one importer':52}{len(single_importers()):8}, most {MAX_SINGLE_IMPORTERS}")
    entered = executed()
    print(f"{'executed by step':52}{len(entered):4} modules{sum(entered.values()):7,} lines")


if __name__ == "__main__":
    main()
