"""`vlora bench teachers` without training: the table and the picture of stored runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusion.bench.rivals import ALONE, DOMAINS, METHODS, SMALL
from vlora.bench.engine import teachers


def test_the_table_has_means_and_spreads_over_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        for place, method in enumerate(METHODS):
            found: dict[str, Any] = {"metric": dict.fromkeys(DOMAINS, "f1"), "num_test": dict.fromkeys(DOMAINS, 400)}
            found["test"] = {name: (place + number + seed) / 20 for number, name in enumerate(DOMAINS)}
            found["standard error"] = dict.fromkeys(DOMAINS, 0.03 + 0.01 * seed)
            (tmp_path / str(seed) / f"{method}.json").write_text(json.dumps(found))
    measured: list[Path] = []

    def latencies(folder: Path, splits: Any, rounds: int) -> dict[str, dict[str, float]]:
        measured.append(folder)
        return {name: {"small model": 1.0, "adapter": 20.0} for name in DOMAINS}

    monkeypatch.setattr(teachers, "_latencies", latencies)
    monkeypatch.setattr(teachers, "splits_of", lambda seed, quick: {})
    monkeypatch.setattr(teachers, "_switching", lambda folder, rounds: [{"what": "nothing", "median ms": 0.0}])
    report = teachers.run(False, tmp_path)
    assert [row["domain"] for row in report.rows] == list(DOMAINS) and measured == [tmp_path / "0"]
    row = report.rows[1]
    assert row[SMALL] == pytest.approx((1 + 0.5) / 20) and row[ALONE] == pytest.approx((2 + 0.5) / 20)
    assert row[f"{SMALL} +-"] == pytest.approx(0.025)  # of the mean of two values with 0.03 and 0.04
    assert row["adapter ms"] == 20
    assert report.goals == [] and len(report.found["runs"]) == 2
    teachers.draw(report.rows, tmp_path)
    assert (tmp_path / "ranking.png").stat().st_size > 10_000
