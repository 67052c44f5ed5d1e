"""Structural rules of the code: import order, sizes, modules without torch, private names."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import pytest

from tests import core_size
from vlora.engine.operations import EngineOperation

ROOT = Path(__file__).parent.parent
TOPS = ("vlora", "atmm", "heads", "fusion", "apps", "benchmarks", "tools")

# Package -> the packages of this project that it may import. A later level may import an earlier one; packages of one
# level do not import each other unless listed.


def own(names: str) -> set[str]:
    return {f"vlora.{name}" for name in names.split()}


BASE = own("errors types wording run_folder")
LEVEL_1 = BASE | own("adapter_files rate_limits config lazy logging_format parallel threads wire") | {"atmm", "heads"}
LEVEL_2 = LEVEL_1 | own("lora memory")
LEVEL_3 = LEVEL_2 | own("orchestrator models")
_SHELL = own("engine learning routing server simulator split client training tune")
MAY_IMPORT: dict[str, set[str]] = {
    **{each: set() for each in {"atmm"} | own("errors wording confidence threads")},
    "heads": own("lazy"),
    **{each: set() for each in own("adapter_files lazy logging_format")},
    **dict.fromkeys(own("plan_files opencv config rate_limits parallel tracing"), BASE),
    **dict.fromkeys(own("types run_folder public_hosts"), own("errors")),
    "vlora.client": BASE | own("adapter_files operations"),
    "vlora.operations": own("types"),
    "vlora.wire": BASE | own("config"),
    "vlora.memory": LEVEL_1,
    "vlora.lora": LEVEL_1 | own("memory"),
    "vlora.routing": BASE | own("orchestrator"),
    "vlora.orchestrator": BASE | own("config memory"),
    "vlora.models": LEVEL_2,
    "vlora.engine": LEVEL_3 | own("operations training split"),
    "vlora.cluster": BASE | own("adapter_files config engine logging_format operations plan_files routing wire"),
    "vlora.split": BASE | own("rate_limits config lazy models wire") | {"atmm"},
    "vlora.training": LEVEL_2 | own("models plan_files"),
    "vlora.learning": BASE | own("adapter_files confidence lora plan_files threads training"),
    "vlora.server": LEVEL_3 | own("cluster engine client learning opencv operations public_hosts tracing"),
    "vlora.simulator": BASE | own("config memory orchestrator routing"),
    "vlora.bench": LEVEL_3 | _SHELL | own("plan_files") | {"fusion"},
    "vlora.tune": LEVEL_2 | own("models"),
    "vlora.cli": LEVEL_3 | (_SHELL - own("routing")) | own("cluster bench operations") | {"fusion", "apps"},
    "fusion": BASE
    | own("adapter_files confidence config lora models engine opencv parallel plan_files training")
    | {"atmm", "heads"},
    "tools": {"fusion"},
    "apps": own("client errors opencv types plan_files public_hosts run_folder"),
    "benchmarks": LEVEL_3 | _SHELL | own("bench cluster opencv plan_files confidence") | {"fusion", "apps"},
}


def room_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "vlora" and len(parts) > 1 else parts[0]


def modules() -> Iterator[tuple[str, Path]]:
    for top in TOPS:
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


@functools.cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """What the laws read of a file, which is parsed once: imports, and attributes that load a checkpoint."""
    found = ast.walk(ast.parse(file.read_text()))
    loads = lambda node: isinstance(node, ast.Attribute) and node.attr == "from_pretrained"  # noqa: E731
    return tuple(node for node in found if isinstance(node, ast.Import | ast.ImportFrom) or loads(node))


def imports(file: Path) -> Iterator[str]:
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide package boundaries"
            if node.module == "vlora":
                yield from (f"vlora.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def test_imports_point_upward() -> None:
    files = [(module, room_of(module), file) for module, file in modules()]
    for module, room, file in files:
        for imported in imports(file) if room != "vlora" else ():
            target = room_of(imported)
            if target.split(".")[0] in TOPS and target not in (room, "vlora"):
                assert target in MAY_IMPORT[room], f"{module} imports {imported}: {room} must not import {target}"
    assert len(files) > 300


def test_no_imports_run_in_a_circle() -> None:
    """No import cycles, including imports for type checking."""
    files = dict(modules())
    graph = {module: set(_modules_read(file, files)) - {module} for module, file in files.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def _modules_read(file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in nodes(file):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module or "" for name in submodules]
        yield from (name for name in names if name in known)


def test_imported_modules_exist() -> None:
    """mypy ignores missing modules, this project's too."""
    for file in (*(file for _, file in modules()), *(ROOT / "tests").rglob("*.py")):
        for name in imports(file):
            assert name.split(".")[0] not in TOPS or core_size.file_of(name).exists(), f"{file}: {name}"


def test_no_module_assigns_a_constant_twice() -> None:
    """The first value would be lost without an error, for example where two modules became one."""
    for module, file in modules():
        found: list[str] = []
        for node in ast.parse(file.read_text()).body:
            match node:
                case ast.Assign(targets=targets):
                    names = [each for target in targets for each in ast.walk(target)]
                    found += [
                        each.id for each in names if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                    ]
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.ClassDef(name=name):
                    found.append(name)
                case ast.FunctionDef(name=name, decorator_list=[]) | ast.AsyncFunctionDef(name=name):
                    found.append(name)  # with decorators: overloads
        assert len(found) == len(set(found)), (module, sorted(found))


def test_every_operation_of_engines_is_performed() -> None:
    """A front end passes others on to its engine, and a cluster refuses them."""
    file = "vlora/engine/operations.py"
    cases = [node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.MatchClass)]
    missing = {each.__name__ for each in get_args(EngineOperation)} - {ast.unparse(case.cls) for case in cases}
    assert not missing, f"add a `case` for each to the `match` of operations in {file}"


def test_no_folder_grows() -> None:
    lines = core_size.lines_by_budget()
    grown = [
        f"{each.folders}: {lines[each.folders]} lines, {lines[each.folders] - each.most} over the limit"
        for each in core_size.BUDGETS
        if lines[each.folders] > each.most
    ]
    assert not grown, "remove as many lines elsewhere in the folder: `BUDGETS` in tests/core_size.py has the limits"
    found = core_size.single_importers()
    assert len(found) <= core_size.MAX_SINGLE_IMPORTERS, "make one of these modules a part of its only importer"


def num_lines(path: str) -> int:
    return (ROOT / path).read_text().count("\n")


def test_files_and_folders_are_small() -> None:
    assert num_lines("vlora/engine/engine.py") <= 200
    files = [file.relative_to(ROOT) for top in TOPS[:-1] for file in (ROOT / top).rglob("*.py")]
    assert len(files) > 300
    assert [str(file) for file in files if num_lines(str(file)) > 450] == []
    folders = [str(file.parent) for file in files if file.name != "__init__.py"]
    crowded = {folder for folder in folders if folders.count(folder) > 14}
    assert [folder for folder in crowded if folder.startswith(("vlora/orchestrator", "vlora/server"))] == []


@pytest.mark.slow
def test_the_steps_of_the_example_do_not_grow() -> None:
    entered = core_size.executed()
    assert len(entered) >= 40  # the calls were followed
    assert sum(entered.values()) <= 3_000
    for module in core_size.EXCLUDED:
        assert core_size.file_of(module).exists(), module


def test_the_reading_list_has_under_1000_lines() -> None:
    section = (ROOT / "README.md").read_text().partition("## Files to read")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \[`([\w/.]+)`\]\(\1\) \| (?:first (\d+) of )?(\d+) \|", section, flags=re.MULTILINE)
    assert len(rows) == 7
    for path, _, lines in rows:
        assert num_lines(path) == int(lines), f"correct the lines of {path} in README.md, Files to read"
    total = sum(int(first or lines) for _, first, lines in rows)
    assert f"{total} lines" in section
    assert total < 1000


def test_tensors_are_written_with_the_usual_permissions() -> None:
    """safetensors' own are for the user who wrote the file; benchmarks read their files themselves."""
    found = {
        module
        for module, file in modules()
        for node in nodes(file)
        if isinstance(node, ast.ImportFrom) and node.module == "safetensors.torch"
        if "save_file" in {name.name for name in node.names} and not module.startswith(("vlora.bench", "benchmarks"))
    }
    assert found == {"heads.storage"}


def test_checkpoints_are_read_by_the_one_way_that_runs_none_of_their_code() -> None:
    ways = {"vlora.models.pretrained", "fusion.teachers.opening"}  # the latter: teachers, from a folder only
    found = {
        module
        for module, file in modules()
        for node in nodes(file)
        if isinstance(node, ast.Attribute)
        if not (isinstance(node.value, ast.Name) and node.value.id in ("InputProcessor", "PeftModel"))
    }
    assert found == ways


def test_ray_is_imported_by_processes_of_ray_only() -> None:
    """A front end that imports it may become a driver, which Ray may end."""
    found = {module for module, file in modules() for name in imports(file) if name.split(".")[0] == "ray"}
    assert found == {f"vlora.cluster.on_ray.{name}" for name in ("driver", "connecting", "local_ray", "actor")}


WITHOUT_TORCH = own(
    "orchestrator routing simulator client cluster.cluster cluster.on_ray.actor cluster.on_ray.cluster cluster.replica "
    "memory.block_manager memory.adapter_cache memory.prefix_cache engine.ipc.client engine.ipc.messages "
    "engine.ipc.supervisor engine.ipc.worker types server.http.routes server.launch "
    "split.batching training.plan wire.connection"
)


def test_these_load_without_torch() -> None:
    """In one process: the first that loads it is named."""
    code = (
        "import importlib, sys\n"
        f"for module in {sorted(WITHOUT_TORCH)}:\n"
        "    importlib.import_module(module)\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), module"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# In libraries, which have no public name for them.
PATCHED = {"_is_mkldnn_bf16_supported", "_unbox_exc"}


def private_names(file: Path) -> Iterator[str]:
    """Private names that a file imports, or passes as strings to `setattr` and the like; ruff finds attributes."""
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "getattr", "patch.object")):
            strings = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)]
            names = [text.rpartition(".")[2] for text in strings if isinstance(text, str)]
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def test_tests_use_no_private_names() -> None:
    replaces_torch = ROOT / "tests" / "simulated_cuda"
    files = [file for file in (ROOT / "tests").rglob("*.py") if replaces_torch not in file.parents]
    found = {f"{file.relative_to(ROOT)}: {name}" for file in files for name in set(private_names(file)) - PATCHED}
    assert not found
