"""Stored results of benchmarks: measured once, with their origin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusion.bench.result_store import ResultStore, origins

HERE: dict[str, Any] = {"commit": "a", "machine": "m", "gpu": None, "versions": {}, "threads": 2}
THERE = {**HERE, "commit": "b"}


def test_a_result_is_measured_once_and_keeps_its_origin(tmp_path: Path) -> None:
    first = ResultStore(tmp_path / "work", HERE).once("x", lambda: {"value": 1})
    later = ResultStore(tmp_path / "work", THERE).once("x", lambda: {"value": 2})
    assert first == later == {"value": 1, "origin": {"commit": "a", "machine": "m", "gpu": None, "versions": {}}}
    other = ResultStore(tmp_path / "work", THERE).once("y", lambda: {"value": 2})
    found = [(each["commit"], each["results"]) for each in origins({"x": first, "y": other, "z": first})]
    assert found == [("a", ["x", "z"]), ("b", ["y"])]


def test_a_latency_is_measured_again_elsewhere(tmp_path: Path) -> None:
    for environment, value in ((HERE, 1), (THERE, 2), (THERE, 2)):
        found = ResultStore(tmp_path, environment).once("times", lambda value=value: {"value": value}, here=True)  # type: ignore[misc]
        assert found["value"] == value
    assert ResultStore(tmp_path, THERE).once("times", dict, here=True)["value"] == 2
