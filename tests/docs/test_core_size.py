"""The sizes that the documentation states: files, folders, the engine core and the README's reading list."""

from __future__ import annotations

import re

import pytest

from tests import core_size
from tests.core_size import ROOT

PACKAGES = ("vlora", "atmm", "heads", "fusion", "apps", "benchmarks")
MAX_EXECUTED_LINES = 3_000
MAX_CORE_LINES = 9_480
MAX_CORE_CODE_LINES = 6_150


def num_lines(path: str) -> int:
    return (ROOT / path).read_text().count("\n")


def test_the_engine_fits_in_200_lines() -> None:
    assert num_lines("vlora/engine/engine.py") <= 200


def test_no_module_has_more_than_450_lines() -> None:
    files = [file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 300
    assert [str(file) for file in files if num_lines(str(file)) > 450] == []


@pytest.mark.parametrize("package", ["vlora/orchestrator", "vlora/server"])
def test_no_folder_has_more_than_14_modules(package: str) -> None:
    for folder in (ROOT / package, *filter(lambda path: path.is_dir(), (ROOT / package).rglob("*"))):
        modules = [file.name for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(modules) <= 14, f"{folder.relative_to(ROOT)}: {modules}"


def test_the_core_does_not_grow() -> None:
    modules, lines, code = core_size.total(core_size.core(), "vlora")
    assert modules > 50  # the imports were followed
    assert lines <= MAX_CORE_LINES
    assert code <= MAX_CORE_CODE_LINES


@pytest.mark.slow
def test_the_steps_of_the_example_do_not_grow() -> None:
    entered = core_size.executed()
    assert len(entered) >= 40  # the calls were followed
    assert sum(entered.values()) <= MAX_EXECUTED_LINES


def test_what_the_core_excludes_exists() -> None:
    for module in (*core_size.START, *(name for names in core_size.EXCLUDED.values() for name in names)):
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
