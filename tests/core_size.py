"""The sizes of all folders, and of the engine core: the functions with which `Engine.step` decides, runs and records.

    python -m tests.core_size [--modules]

`executed` counts the functions of `vlora` that the steps of `examples/minimal_engine.py` enter, with their docstrings
and comments, without those of `EXCLUDED`. The example serves the base model and an adapter, text with a picture,
unmerged, mixed and merged. docs/limits.md has the figures. Commit 8242a2a has 2,745. The goal is at most 3,000.

`core` is the import closure, within `vlora`, of `START`, the modules with the methods that `Engine.step` calls. The
modules of `EXCLUDED` are not entered, so what only they import does not count either. `START` is a list because
`vlora.engine.build` is what imports these modules, to construct them. The libraries `atmm` (the LoRA kernels) and
`heads` (the task heads) have interfaces of their own and count separately: all that the core's imports of them reach,
for all devices and kinds of heads, without `EXCLUDED`. The same definition, with the former names, gives 8,813 lines
for commit 8242a2a, 5,967 of code (`code_lines`); there `engine.py` still contains the construction. The closure
exceeds the executed functions by class attributes, features that the example does not use (deadlines, fair shares,
preemption, compaction, prefix cache, penalties) and imports.

In a trace of the calls of `Engine.step` in `examples/minimal_engine.py`, a step enters these parts of excluded modules
and no others: grammars, adapter versions and monitoring (hooks, the scheduler's counters, `hold`),
`AdapterAdmin.poll`, `to_tensor` of the image processor's module, `is_split` and `parts_of` of `vlora.parallel`.
"""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
PROJECT = ("vlora", "atmm", "heads")
_READING_S = 1e-3  # between two readings of the clock

START = (
    "vlora.engine.engine",
    "vlora.engine.steps_in_order",
    "vlora.engine.adapter_loader",
    "vlora.orchestrator.scheduler",
    "vlora.orchestrator.policies.base",
    "vlora.orchestrator.policies.algorithm1",
    "vlora.orchestrator.policies.cost_based",
    "vlora.memory.block_manager",
    "vlora.memory.adapter_cache",
    "vlora.lora.registry",
    "vlora.lora.merge_shadow",
    "vlora.models.runner",
)

EXCLUDED: Mapping[str, tuple[str, ...]] = {
    "tensor parallelism": (
        "vlora.engine.tensor_parallel",
        "vlora.parallel",
        "vlora.models.sharding",
    ),
    "other forms of adapters than LoRA": (
        "vlora.lora.composition",
        "vlora.lora.output_changes",
        "vlora.lora.own_layers",
    ),
    "processes": ("vlora.engine.ipc",),
    "grammars": ("vlora.engine.grammar_cache", "vlora.models.grammar"),
    "training": (
        "vlora.engine.trainings",
        "vlora.orchestrator.latency_promise",
        "vlora.training",
        "vlora.types.training",
    ),
    "monitoring": ("vlora.engine.monitor", "vlora.engine.snapshot", "vlora.orchestrator.stats"),
    "what only a GPU uses": (
        "vlora.engine.steps_ahead",
        "vlora.models.gpu",
        "vlora.models.vision.flash_tower",
        "vlora.lora.joined_weights",
        "vlora.memory.ring_transfer",
        "vlora.memory.written_blocks",
    ),
    "construction, once before the first step": (
        "vlora.config",
        "vlora.lazy",
        "vlora.threads",
        "vlora.engine.build",
        "vlora.engine.device_runtime",
        "vlora.engine.limits",
        "vlora.lora.slab_layout",
        "vlora.memory.huge_pages",
        "vlora.models.supported",
        "vlora.orchestrator.policies.registry",
        "atmm.tuning",
        "atmm.warmup",
        "atmm.cutlass.build",
    ),
    "answers that other engines began, which step only polls": ("vlora.engine.adapter_versions",),
    "requests, checked before a step": ("vlora.engine.request_checks", "vlora.types.composition"),
    "the operator's adapter changes, which step only polls": ("vlora.engine.adapter_admin",),
    "the format of adapter files, read in another thread": (
        "vlora.adapter_files",
        "vlora.lora.layer_reading",
        "vlora.lora.peft_format",
        "vlora.lora.peft_settings",
        "vlora.lora.peft_target",
        "vlora.types.domain",
    ),
    "the front end's image processor and tokenizer": ("vlora.models.processing",),
    "what callers may see, which the front end reads": ("vlora.types.visibility",),
    "installations without greenlet": ("vlora.models.vision.whole_call",),
}
"""Reason -> packages and modules that are not part of the core."""


class Budget(NamedTuple):
    """Lines of Python, tests apart. most: what the folders may have now, which only goes down. target: the aim."""

    folders: str
    most: int
    target: int


BUDGETS = (
    Budget("vlora vlora/types vlora/plan_files vlora/wording", 3_260, 2_200),
    Budget("vlora/client", 1_740, 900),
    Budget("vlora/server", 8_020, 4_900),
    Budget("vlora/engine vlora/parallel", 6_940, 4_900),
    Budget("vlora/orchestrator vlora/routing", 5_480, 4_000),
    Budget("vlora/memory vlora/lora vlora/models", 11_580, 8_300),
    Budget("vlora/cluster", 7_940, 3_700),
    Budget("vlora/wire", 880, 1_000),
    Budget("vlora/split", 2_580, 1_600),
    Budget("vlora/training vlora/learning fusion/training", 7_280, 4_500),
    Budget("vlora/simulator", 2_280, 1_500),
    Budget("vlora/cli", 3_960, 2_600),
    Budget("vlora/bench", 4_740, 2_500),
    Budget("benchmarks", 9_000, 6_500),
    Budget("fusion", 10_080, 6_200),
    Budget("tools", 940, 800),
    Budget("atmm apps heads", 13_280, 10_500),
)
"""Each file counts for the longest folder that it is in."""

MAX_SINGLE_IMPORTERS = 112
"""Modules that only one other module imports: most of them would be easier to find as a part of it."""


class Size(NamedTuple):
    """lines: all lines of the file. code: without blanks, comments and docstrings. imports: its modules of the core."""

    lines: int
    code: int
    imports: tuple[str, ...]


def core(start: Sequence[str] = START, excluded: Mapping[str, tuple[str, ...]] = EXCLUDED) -> dict[str, Size]:
    """The core's modules with their sizes, in order of discovery; those of `atmm` and `heads` too."""
    left_out = tuple(name for names in excluded.values() for name in names)
    sizes: dict[str, Size] = {}
    pending = list(reversed(start))
    while pending:
        module = pending.pop()
        if module in sizes:
            continue
        text = file_of(module).read_text()
        tree = ast.parse(text)
        found = [name for name in imported(tree) if not is_within(name, left_out)]
        sizes[module] = Size(text.count("\n"), code_lines(text, tree), tuple(sorted(set(found))))
        pending += reversed(found)
    return sizes


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
    left_out = tuple(name for names in EXCLUDED.values() for name in names)
    found: dict[str, int] = {}
    for file in {file for file, _ in entered if Path(file).is_relative_to(ROOT / "vlora")}:
        module = ".".join(Path(file).relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not is_within(module, left_out):
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


def total(sizes: Mapping[str, Size], package: str) -> tuple[int, int, int]:
    """Modules, lines and lines of code of a package."""
    own = [size for module, size in sizes.items() if is_within(module, (package,))]
    return len(own), sum(size.lines for size in own), sum(size.code for size in own)


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of these packages or in one of them."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def file_of(module: str) -> Path:
    """The file of a module of the project."""
    path = ROOT.joinpath(*module.split("."))
    package = path / "__init__.py"  # a folder alone may be left over, with bytecode
    return package if package.exists() else path.with_suffix(".py")


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules of the project that this one imports, in functions and at the top, but not for type checking only."""
    for node in ast.walk(_without_type_checking(tree)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in PROJECT)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PROJECT:
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if file_of(name).exists() else node.module


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    documented: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in documented for number, line in lines
    )


def _without_type_checking(tree: ast.Module) -> ast.Module:
    kept = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    ]
    return ast.Module(kept, [])


def main() -> None:
    folders = lines_by_budget()
    for budget in BUDGETS:
        print(f"{budget.folders:52}{folders[budget.folders]:8,} lines, most {budget.most:,}, target {budget.target:,}")
    print(f"{'sum':52}{sum(folders.values()):8,} lines, target {sum(budget.target for budget in BUDGETS):,}")
    print(f"{'modules with one importer':52}{len(single_importers()):8}, most {MAX_SINGLE_IMPORTERS}")
    sizes = core()
    if "--modules" in sys.argv[1:]:
        for module, size in sorted(sizes.items()):
            print(f"{size.lines:6}{size.code:6}  {module}")
    rooms = sorted({".".join(module.split(".")[:2]) for module in sizes if module.startswith("vlora.")})
    for title, package in (
        ("core", "vlora"),
        *((f"  {room}", room) for room in rooms),
        *((name, name) for name in PROJECT[1:]),
    ):
        modules, lines, code = total(sizes, package)
        print(f"{title:22}{modules:4} modules{lines:7,} lines{code:7,} of code")
    entered = executed()
    print(f"{'executed by step':22}{len(entered):4} modules{sum(entered.values()):7,} lines")


if __name__ == "__main__":
    main()
