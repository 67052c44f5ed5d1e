"""docs/tour.md has the values of a run of examples/tour.py, and the functions that it names exist."""

from __future__ import annotations

import ast
import re

from examples import tour
from tests.docs.test_api_guide import ROOT

PAGE = tour.PAGE.read_text()


def test_the_page_has_the_values_of_a_run() -> None:
    values = tour.collect()
    assert [name for _, name in tour.BLOCK.findall(PAGE)] == list(values)
    assert tour.with_values(PAGE, values) == PAGE, "run `python examples/tour.py`: the page is out of date"


def test_the_page_has_eight_stops() -> None:
    assert re.findall(r"^## (\d)\. ", PAGE, re.MULTILINE) == list("12345678")


def test_files_and_functions_of_the_page_exist() -> None:
    named = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", PAGE)
    assert len(named) > 30
    missing = [f"{path}: {name}" for name, path in named if name not in definitions(path)]
    assert not missing


def definitions(path: str) -> set[str]:
    """The classes and functions of a file, and methods as `Class.method`."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {node.name, *(f"{node.name}.{method.name}" for method in methods)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found
