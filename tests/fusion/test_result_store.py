"""Stored results of benchmarks: measured once, with their origin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusion.bench import retrieval
from fusion.bench.result_store import ResultStore, origins
from fusion.bench.retrieval import Collection, Prepared
from fusion.synthetic.searched_videos import Query

HERE: dict[str, Any] = {"commit": "a", "machine": "m", "gpu": None, "versions": {}, "threads": 2}
THERE = {**HERE, "commit": "b"}


def test_a_result_is_measured_once_and_keeps_its_origin(tmp_path: Path) -> None:
    first = ResultStore(tmp_path / "work", HERE).once("x", lambda: {"value": 1})
    later = ResultStore(tmp_path / "work", THERE).once("x", lambda: {"value": 2})
    assert first == later == {"value": 1, "origin": {"commit": "a", "machine": "m", "gpu": None, "versions": {}}}
    other = ResultStore(tmp_path / "work", THERE).once("y", lambda: {"value": 2})
    found = [(each["commit"], each["results"]) for each in origins({"x": first, "y": other, "z": first})]
    assert found == [("a", ["x", "z"]), ("b", ["y"])]


def test_the_origin_of_an_earlier_versions_result_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"value": 1}')
    [origin] = origins({"x": ResultStore(tmp_path, HERE).once("x", dict)})
    assert origin["commit"] is None and origin["results"] == ["x"]


def test_a_prepared_collection_is_read_as_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query("a red car", "a.mp4", 2)
    made = Prepared("base", "adapters", [Collection("streets", "videos", 1, "?", "!", [query])], {"x": 0.5}, 2.0)
    monkeypatch.setattr(retrieval, "make_prepared", lambda *_: made)
    first = retrieval.prepare(True, tmp_path, print, HERE)
    monkeypatch.setattr(retrieval, "make_prepared", pytest.fail)
    again = retrieval.prepare(True, tmp_path, print, THERE)
    assert (
        first == again == made._replace(origin={name: HERE[name] for name in ("commit", "machine", "gpu", "versions")})
    )


def test_a_latency_is_measured_again_elsewhere(tmp_path: Path) -> None:
    for environment, value in ((HERE, 1), (THERE, 2), (THERE, 2)):
        found = ResultStore(tmp_path, environment).once("times", lambda value=value: {"value": value}, here=True)  # type: ignore[misc]
        assert found["value"] == value
    assert ResultStore(tmp_path, THERE).once("times", dict, here=True)["value"] == 2
