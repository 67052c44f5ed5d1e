"""`vlora bench fusion` without training: its domains, jobs, counts and plots."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusion.bench import draw, jobs
from fusion.bench.domains import FAMILIES, BenchDomain, Sizes
from fusion.bench.measuring import (
    ALL,
    ALONE,
    DEFAULT,
    JOINTLY,
    NAIVE,
    OPTIMUM,
    PACKED,
    Meter,
    SmallScores,
    score_small_model,
)
from fusion.bench.result_store import ResultStore
from fusion.bench.suite import SUITE, suspected
from fusion.packing.algorithm import History, Score, TrainingResult
from fusion.plan.tasks import METRICS
from tests.fusion import bench_jobs
from tests.fusion.bench_jobs import a_curve
from tests.processes import is_alive, until

EVERY = {made.name: made for made in (*SUITE, *(made for family in FAMILIES.values() for made in family))}


@pytest.mark.slow
@pytest.mark.parametrize("made", [made for made in EVERY.values() if made.draw is not None], ids=lambda made: made.name)
def test_a_domains_parts_share_no_picture_and_hold_every_label(made: BenchDomain) -> None:
    splits = made.splits(0, Sizes(60, 30, 10))
    parts = (splits.train, splits.validation, splits.test)
    assert [len(part) for part in parts] == [60, 30, 10]
    shown = [tuple(frame.tobytes() for frame in sample.frames) for part in parts for sample in part]
    assert len(set(shown)) == 100
    if made.labels and made.task not in ("detection", "multi_label", "regression"):
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


def test_the_suite_has_ten_domains_over_six_tasks_and_contradictions() -> None:
    assert len(SUITE) >= 10 and len({made.task for made in SUITE}) >= 6
    assert suspected(SUITE) == (
        ("things", "paints"),
        ("things", "captions"),
        ("paints", "captions"),
        ("places", "mirrored"),
    )


def test_contradicting_domains_expect_other_words_for_the_same_pictures() -> None:
    words = [{str(s.target) for s in EVERY[name].splits(0, Sizes(80, 1, 1)).train} for name in suspected(SUITE)[0]]
    assert not words[0] & words[1]
    places, mirrored = (EVERY[name].draw for name in ("places", "mirrored"))
    assert places is not None and mirrored is not None
    # The same picture gets another answer, unless it shows the middle of the middle lane.
    pairs = [(places(np.random.default_rng(seed)), mirrored(np.random.default_rng(seed))) for seed in range(40)]
    assert all(np.array_equal(one.frames[0], other.frames[0]) for one, other in pairs)
    assert all((one.target == other.target) == (one.target == "middle lane middle") for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["places"])
def test_a_small_model_learns_more_than_its_start(name: str) -> None:
    made = EVERY[name]
    splits, metric = made.splits(0, Sizes(320, 60, 60)), METRICS[made.task][0]
    before, after = (score_small_model(splits, metric, epochs) for epochs in (0, 6))
    assert after.validation > before.validation and 0 < after.test <= 1


class Stored:
    """A `RunCache` in which every training takes two seconds."""

    conflict_cost = 0.5

    def __call__(self, adapter: Any) -> TrainingResult:
        return TrainingResult({name: Score(1.0, 1.0) for name in adapter}, 2.0)

    together = __call__

    def join(self, before: History, beside: Any, domain: str) -> TrainingResult:
        return self((*beside, domain))

    def conflicts(self, history: History, domains: Any) -> dict[frozenset[str], float]:
        return {}


def test_a_training_is_counted_once_in_single_domain_trainings() -> None:
    cache: Any = Stored()
    meter = Meter(cache)
    for _ in range(2):
        meter(("a",))
        meter.together(["a"])  # the same as in sequence
        meter(("a", "b"))
        meter.together(["b", "a", "c"])
        meter.join(History(("a", "b", "c")), ("a",), "b")
    assert meter.trainings == 1 + 1 + 3 + 1 and meter.seconds == 2 * 4
    meter.conflicts(History(("a", "b")), ["a", "b"])
    assert meter.trainings == 7 and 8 < meter.seconds < 9


class Contradicting(Stored):
    """Contradicting domains miss their thresholds in one adapter."""

    conflict_cost = 0.02

    def __call__(self, adapter: Any) -> TrainingResult:
        pairs = [pair for pair in suspected(SUITE) if set(pair) <= set(adapter)]
        low = {name for pair in pairs for name in pair}
        return TrainingResult({name: Score(*[0.1 if name in low else 1.0] * 2) for name in adapter}, 2.0)

    together = __call__

    def conflicts(self, history: History, domains: Any) -> dict[frozenset[str], float]:
        return {frozenset(pair): 0.5 for pair in suspected(SUITE) if set(pair) <= set(domains)}


def test_growth_packs_parts_of_the_suite_that_contain_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Bench:
        splits = None
        rehearsing = Contradicting()

        def __init__(self, made: Any, *_: object) -> None:
            self.domains = {one.name: one for one in made}

    monkeypatch.setattr(jobs, "Bench", Bench)
    monkeypatch.setattr(jobs, "small_scores", lambda _: {made.name: SmallScores(0.9, 0.9) for made in SUITE})
    rows = jobs.BenchJob(0, "growth", False).measure(tmp_path)["rows"]
    parts = [set(row["domains"]) for row in rows]
    assert [len(part) for part in parts] == [3, 6, 9, 12]
    assert all(part < larger for part, larger in itertools.pairwise(parts))
    assert [row["alone s"] for row in rows] == [6, 12, 18, 24]
    *_, nine, whole = rows
    assert nine["optimum"] is None is whole["optimum"] and whole["lower bound"] == 3
    for row, part in zip(rows, parts, strict=True):
        groups = [part & {"things", "paints", "captions"}, part & {"places", "mirrored"}]
        least = max(1, *map(len, groups))
        assert row["lower bound"] == least and (row["optimum"] or least) == least <= row["adapters"] <= least + 1
        assert len(part) <= row["trainings"] <= 2 * len(part)


def a_table(seed: int, packed: float) -> dict[str, Any]:
    def method(adapters: int, a: float, b: float) -> dict[str, Any]:
        return {"adapters": adapters, "trainings": 3.5, "training s": 9.0, "test": {"a": a, "b": b}}

    return {
        "seed": seed,
        "thresholds": {"a": 0.8, "b": 0.7},
        "methods": {
            ALONE: method(2, 0.9, 0.9),
            ALL: method(1, 0.9, 0.5),
            DEFAULT: method(3, packed, 0.75),
            NAIVE: method(2, 0.5, 0.6),
            PACKED: method(2, 0.85, 0.8),
            JOINTLY: method(1, 0.85, 0.8),
            OPTIMUM: method(1, 0.85, 0.8),
        },
        "missed alone": [],
        "lower bound": 2,
        "small models": {name: {"validation": 0.9, "test": 0.95} for name in "ab"},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = ResultStore(tmp_path, {"commit": "1f" * 20})
    for seed in (0, 1, 2):
        store.write(f"table-{seed}", a_table(seed, 0.81 if seed else 0.79))
        for family in FAMILIES:
            store.write(f"{family}-{seed}", a_curve(family, seed))
    store.write("growth-0", {"seed": 0, "rows": PARTS})
    return tmp_path


PARTS = [
    {
        "domains": ["a", "b"],
        "adapters": 2,
        "lower bound": 1,
        "optimum": None,
        "trainings": 3.0,
        "training s": 60.0,
        "alone s": 40.0,
    },
    {
        "domains": ["a", "b", "c"],
        "adapters": 3,
        "lower bound": 1,
        "optimum": 2,
        "trainings": 5.7,
        "training s": 115.0,
        "alone s": 60.0,
    },
]


def test_missed_thresholds_are_counted_on_test_data(folder: Path) -> None:
    """All results are stored, so nothing is trained."""
    found = jobs.run(False, folder, pytest.fail)
    own = [row for row in found.rows if row["method"] == DEFAULT]
    assert [(row["seed"], row["broken"], round(row["worst"], 3)) for row in own] == [
        (0, 1, -0.01),
        (1, 0, 0.01),
        (2, 0, 0.01),
    ]
    assert [row["a"] for row in found.rows if row["method"] == "(threshold)"] == [0.8] * 3
    more, cost, broken, all_in_one = found.goals
    assert (more.value, cost.value, broken.value, all_in_one.value) == (2, pytest.approx(1.9), 1, 1)
    assert (more.goal, cost.goal, all_in_one.goal, all_in_one.at_most) == (1, 2, 1, False)
    assert broken.goal == pytest.approx(0.3) and "of 6 at 0.95" in broken.name


def test_beyond_six_domains_the_lower_bound_stands_for_the_optimum(folder: Path) -> None:
    for seed in (0, 1, 2):
        table = a_table(seed, 0.81)
        del table["methods"][OPTIMUM]
        ResultStore(folder, {}).write(f"table-{seed}", table)
    assert jobs.run(False, folder, pytest.fail).goals[0].value == 1


def test_a_domain_that_misses_alone_is_not_counted(folder: Path) -> None:
    table = a_table(0, 0.79)
    table["missed alone"] = ["a"]
    ResultStore(folder, {}).write("table-0", table)
    found = jobs.run(False, folder, pytest.fail)
    assert found.goals[2].value == 0 and "of 5" in found.goals[2].name
    assert next(row for row in found.rows if row["method"] == DEFAULT)["broken"] == 0


def test_missing_results_are_measured_in_their_own_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "action-1.json").unlink()
    monkeypatch.setattr(jobs, "run_job", bench_jobs.quick_job)
    lines: list[str] = []
    found = jobs.run(False, folder, lines.append, {"commit": "2e" * 20, "machine": "here"})
    assert len(found.curves) == 12 and lines == ["action-1: 2 s, 1 s of processor time"]
    before, now = found.origins
    assert (before["commit"], before["machine"], len(before["results"])) == ("1f" * 20, None, 15)
    assert (now["commit"], now["machine"], now["results"]) == ("2e" * 20, "here", ["action-1"])


def test_a_job_that_fails_is_named_and_ends_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 1):
        (folder / f"action-{seed}.json").unlink()
    monkeypatch.setattr(jobs, "run_job", bench_jobs.failing_job)
    with pytest.raises(RuntimeError, match="the job action-1 ended with exit code 3"):
        jobs.run(False, folder, pytest.fail)
    assert not alive_jobs(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)  # for a busy machine
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive), signal.SIGTERM])
def test_no_job_outlives_the_bench(tmp_path: Path, number: signal.Signals) -> None:
    bench = subprocess.Popen(
        [sys.executable, "-m", "tests.fusion.bench_jobs", str(tmp_path)],
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: bool(alive_jobs(tmp_path)), 240)  # each process imports torch
        (os.killpg if number == signal.SIGINT else os.kill)(bench.pid, number)
        assert bench.wait(30) != 0
        until(lambda: not alive_jobs(tmp_path))
    finally:
        os.killpg(bench.pid, signal.SIGKILL) if bench.poll() is None else None


def alive_jobs(folder: Path) -> list[int]:
    """Process ids of the jobs that have begun and still run."""
    return [pid for file in folder.glob("*.pid") if is_alive(pid := int(file.read_text()))]


def test_plots_are_written(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import cv2

    found = jobs.run(False, folder, pytest.fail)
    draw(found.tables, found.curves, found.growth, tmp_path / "pictures")
    for name in ("capacity", "small_models", "methods", "growth"):
        picture = cv2.imread(str(tmp_path / "pictures" / f"{name}.png"))
        assert picture is not None and picture.std() > 10
