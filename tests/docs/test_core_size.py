"""The sizes that the documentation states: files, folders, a step of the engine, and the README's reading list."""

from __future__ import annotations

import re

import pytest

from tests import core_size
from tests.core_size import ROOT

PACKAGES = ("vlora", "atmm", "heads", "fusion", "apps", "benchmarks")
MAX_EXECUTED_LINES = 3_000


def num_lines(path: str) -> int:
    return (ROOT / path).read_text().count("\n")


def test_files_and_folders_are_small() -> None:
    assert num_lines("vlora/engine/engine.py") <= 200
    files = [file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 300
    assert [str(file) for file in files if num_lines(str(file)) > 450] == []
    modules = [file.parent for file in files if file.name != "__init__.py"]
    crowded = [str(folder) for folder in {*modules} if modules.count(folder) > 14]
    assert [folder for folder in crowded if folder.startswith(("vlora/orchestrator", "vlora/server"))] == []


@pytest.mark.slow
def test_the_steps_of_the_example_do_not_grow() -> None:
    entered = core_size.executed()
    assert len(entered) >= 40  # the calls were followed
    assert sum(entered.values()) <= MAX_EXECUTED_LINES
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
