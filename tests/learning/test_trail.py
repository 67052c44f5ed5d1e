"""The audit trail: the served version by its lines, and lines that a full disk has cut."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from vlora.learning.trail import Served, Trail


def trail(folder: Path) -> Trail:
    return Trail(folder / "trail.jsonl", lambda: 86400.0)


def test_a_line_has_time_caller_versions_and_reason(tmp_path: Path) -> None:
    trail(tmp_path).append("promoted", "ann", version="v2", before="v1", why="it is better", details={"lower": 0.5})
    (line,) = (tmp_path / "trail.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "at": 86400.0,
        "time": "1970-01-02T00:00:00Z",
        "event": "promoted",
        "by": "ann",
        "version": "v2",
        "before": "v1",
        "why": "it is better",
        "details": {"lower": 0.5},
    }


def test_the_last_decision_sets_the_served_version(tmp_path: Path) -> None:
    own = trail(tmp_path)
    assert own.served() is None
    steps: list[tuple[str, str, Served]] = [
        ("imported", "a", Served("a", ())),
        ("evaluated", "b", Served("a", ())),
        ("promoted", "b", Served("b", ("a",))),
        ("promoted", "c", Served("c", ("a", "b"))),
        ("rolled_back", "b", Served("b", ("a",))),
        ("promoted", "c", Served("c", ("a", "b"))),
        ("promoted", "a", Served("a", ("b", "c"))),
        ("rolled_back", "b", Served("b", ())),
        ("rolled_back", "d", Served("d", ())),
    ]
    for event, version, expected in steps:
        own.append(event, "x", version=version)  # type: ignore[arg-type]
        assert own.served() == trail(tmp_path).served() == expected


def test_a_line_that_a_full_disk_cut_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = trail(tmp_path)
    own.append("imported", "x", version="a")
    size = (tmp_path / "trail.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, hard))
    try:
        with pytest.raises(OSError, match="the disk is full"):
            own.append("promoted", "x", version="b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "trail.jsonl").stat().st_size == size, "the part was taken back"
    with (tmp_path / "trail.jsonl").open("ab") as file:
        file.write(b'{"at": 1, "time": ')  # a machine without power
    assert own.served() == trail(tmp_path).served() == Served("a", ())
    assert "line 2 is no entry" in caplog.text
    own.append("promoted", "x", version="c")
    assert trail(tmp_path).served() == Served("c", ("a",))


def test_a_line_that_is_not_on_disk_does_not_count_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = trail(tmp_path)
    own.append("imported", "a", version="v1")

    def fail(descriptor: int) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "fsync", fail)
        own.append("promoted", "a", version="v2", before="v1")
    assert own.served() == trail(tmp_path).served() == Served("v1", ())
