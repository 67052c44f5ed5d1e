"""`vlora bench teachers` without training: the table and the picture of stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusion.bench.result_store import ResultStore
from fusion.bench.rivals import ALONE, DOMAINS, METHODS, SMALL
from vlora.bench.engine import teachers
from vlora.bench.report import environment


def test_the_table_has_means_and_spreads_over_seeds(tmp_path: Path) -> None:
    for seed in (0, 1):
        store = ResultStore(tmp_path / str(seed), environment() if seed == 0 else {})
        for place, method in enumerate(METHODS):
            found: dict[str, Any] = {"metric": dict.fromkeys(DOMAINS, "f1"), "num_test": dict.fromkeys(DOMAINS, 400)}
            found["test"] = {
                name: (place + number) / 20 + seed * (0.02 if number else 0.2) for number, name in enumerate(DOMAINS)
            }
            found["standard error"] = dict.fromkeys(DOMAINS, 0.03 + 0.01 * seed)
            store.write(method, found)
    latencies = {name: {"small model": 1.0, "adapter": 20.0} for name in DOMAINS}
    switching = [{"what": "small model: load", "median ms": 5.0}]
    ResultStore(tmp_path / "0", environment()).write("times", {"latencies": latencies, "switching": switching})
    report = teachers.run(False, tmp_path)
    assert [row["domain"] for row in report.rows] == list(DOMAINS)
    row = report.rows[1]
    assert row[SMALL] == pytest.approx(1 / 20 + 0.01) and row[ALONE] == pytest.approx(2 / 20 + 0.01)
    assert row[f"{SMALL} +-"] == pytest.approx(0.025)  # of the mean of two values with 0.03 and 0.04
    assert report.rows[0][f"{SMALL} +-"] == pytest.approx(0.1)  # of the mean of two seeds that differ by 0.2
    assert row["adapter ms"] == 20
    assert report.found["switching"] == switching
    assert report.goals == [] and len(report.found["runs"]) == 2
    assert [len(origin["results"]) for origin in report.found["origins"]] == [3, 3]
    teachers.draw(report.rows, tmp_path)
    assert (tmp_path / "ranking.png").stat().st_size > 10_000
