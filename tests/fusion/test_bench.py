"""`vlora bench fusion` without training: its domains, jobs, counts and plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusion.bench import draw, jobs
from fusion.bench.domains import FAMILIES, SIX, BenchDomain, Sizes
from fusion.bench.measuring import JOINTLY, NAIVE, OPTIMUM, PACKED

EVERY = {made.name: made for made in (*SIX, *(made for family in FAMILIES.values() for made in family))}


@pytest.mark.slow
@pytest.mark.parametrize("made", [made for made in EVERY.values() if made.draw is not None], ids=lambda made: made.name)
def test_a_domains_parts_share_no_picture_and_hold_every_label(made: BenchDomain) -> None:
    splits = made.splits(0, Sizes(60, 30, 10))
    parts = (splits.train, splits.validation, splits.test)
    assert [len(part) for part in parts] == [60, 30, 10]
    shown = [tuple(frame.tobytes() for frame in sample.frames) for part in parts for sample in part]
    assert len(set(shown)) == 100
    if made.labels and made.task != "detection":
        targets = [sample.target for part in parts for sample in part]
        assert set(targets) == set(range(len(made.labels)))
        assert max(map(targets.count, set(targets))) < 80  # no label dominates
    again = made.splits(0, Sizes(2, 1, 1))
    assert np.array_equal(again.train[0].frames[0], splits.train[0].frames[0])
    assert not np.array_equal(made.splits(1, Sizes(2, 1, 1)).train[0].frames[0], splits.train[0].frames[0])


def test_the_digits_are_cut_so_that_five_hundred_test() -> None:
    pytest.importorskip("sklearn")
    splits = EVERY["digits"].splits(0, Sizes(1200, 500, 500))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (797, 500, 500)
    shown = [sample.frames[0].tobytes() for part in (splits.train, splits.validation, splits.test) for sample in part]
    assert len(set(shown)) > 1780  # some scans are identical


def test_a_detector_of_one_class_learns_that_class_only() -> None:
    targets = [sample.target for sample in EVERY["find-bus"].splits(0, Sizes(40, 10, 10)).train]
    assert all(box.label == 0 for target in targets for box in target)  # type: ignore[union-attr]
    assert 20 < sum(bool(target) for target in targets) < 40


def a_table(seed: int, packed: float) -> dict[str, Any]:
    def method(adapters: int, a: float, b: float) -> dict[str, Any]:
        return {"adapters": adapters, "rollbacks": 1, "test": {"a": a, "b": b}}

    return {
        "seed": seed,
        "thresholds": {"a": 0.8, "b": 0.7},
        "methods": {
            "one adapter per domain": method(2, 0.9, 0.9),
            NAIVE: method(2, 0.5, 0.6),
            PACKED: method(3, packed, 0.75),
            JOINTLY: method(1, 0.85, 0.8),
            OPTIMUM: method(1, 0.85, 0.8),
        },
        "missed alone": [],
        "teachers": {"a": 0.95},
    }


def a_curve(family: str, seed: int) -> dict[str, Any]:
    return {"family": family, "seed": seed, "alone": {"a": 0.8, "b": 0.6}, "fused": [{"a": 0.8}, {"a": 0.4, "b": 0.6}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in (0, 1, 2):
        (tmp_path / f"table-{seed}.json").write_text(json.dumps(a_table(seed, 0.81 if seed else 0.79)))
        for family in FAMILIES:
            (tmp_path / f"{family}-{seed}.json").write_text(json.dumps(a_curve(family, seed)))
    return tmp_path


def test_missed_thresholds_are_counted_on_test_data(folder: Path) -> None:
    """All results are stored, so nothing is trained."""
    found = jobs.run(False, folder, pytest.fail)
    packed = [row for row in found.rows if row["method"] == PACKED]
    assert [(row["seed"], row["broken"], round(row["worst"], 3)) for row in packed] == [
        (0, 1, -0.01),
        (1, 0, 0.01),
        (2, 0, 0.01),
    ]
    assert [row["a"] for row in found.rows if row["method"] == "(threshold)"] == [0.8] * 3
    first_fit, jointly = found.goals[:2], found.goals[2:]
    for (more, broken), expected in ((first_fit, (2, 1)), (jointly, (0, 0))):
        assert (more.value, broken.value) == expected
        assert more.goal == 1 and broken.goal == pytest.approx(0.3) and "of 6 at 0.95" in broken.name


def test_a_domain_that_misses_alone_is_not_counted(folder: Path) -> None:
    table = a_table(0, 0.79)
    table["missed alone"] = ["a"]
    (folder / "table-0.json").write_text(json.dumps(table))
    assert jobs.run(False, folder, pytest.fail).goals[1].value == 0


def test_missing_results_are_measured_in_their_own_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "action-1.json").unlink()
    measured: list[jobs.BenchJob] = []

    def work(job: jobs.BenchJob) -> str:
        measured.append(job)
        job.result.write_text(json.dumps(a_curve(job.family, job.seed)))
        return f"{job.family}, seed {job.seed}"

    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(jobs, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))
    monkeypatch.setattr(jobs, "run_job", work)
    lines: list[str] = []
    assert len(jobs.run(False, folder, lines.append).curves) == 12
    assert [(job.family, job.seed) for job in measured] == [("action", 1)] and lines == ["action, seed 1"]


def test_plots_are_written(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import cv2

    found = jobs.run(False, folder, pytest.fail)
    draw(found.tables, found.curves, tmp_path / "pictures")
    for name in ("capacity", "teachers"):
        picture = cv2.imread(str(tmp_path / "pictures" / f"{name}.png"))
        assert picture is not None and picture.std() > 10
