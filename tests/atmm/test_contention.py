"""Contention is the time in which threads of this process were runnable but had no core."""

from __future__ import annotations

from pathlib import Path

import pytest

from atmm.tuning import matmul_choice
from atmm.tuning.matmul_choice import Contention


def tasks(folder: Path, *waited_ns: int) -> None:
    for number, waited in enumerate(waited_ns):
        (folder / str(number)).mkdir(exist_ok=True)
        (folder / str(number) / "schedstat").write_text(f"900000000 {waited} 12\n")


def test_time_without_a_core_is_summed_over_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_choice, "TASKS", tmp_path)
    now = 10.0
    monkeypatch.setattr(matmul_choice.time, "monotonic", lambda: now)
    tasks(tmp_path, 5_000_000_000, 0)
    found = Contention()
    now += 2.0
    tasks(tmp_path, 5_040_000_000, 40_000_000)
    assert not found.disturbs(), "80 ms of 2 s"
    tasks(tmp_path, 5_040_000_000, 80_000_000)
    assert found.disturbs(), "120 ms of 2 s"


def test_systems_without_schedstat_count_as_undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_choice, "TASKS", tmp_path / "none")
    assert not Contention().disturbs()
