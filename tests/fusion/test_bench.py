"""`vlora bench fusion` and `retrieve`, and block-diagonal adapters, without training: domains, counts and goals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import adapters
from benchmarks.fusion import packing as packing_bench
from benchmarks.fusion.domains import SUITE, BenchDomain, Sizes, suspected
from benchmarks.fusion.packing import (
    ALL,
    ALONE,
    DEFAULT,
    JOINTLY,
    NAIVE,
    OPTIMUM,
    PACKED,
    Meter,
)
from fusion.packing.algorithm import History, Score, TrainingResult
from fusion.plan.schema import LoraPlan
from tests.fusion import small
from vlora.bench.harness import Measured

EVERY = {made.name: made for made in SUITE}


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


def test_contradicting_domains_expect_other_words_for_the_same_pictures() -> None:
    words = [{str(s.target) for s in EVERY[name].splits(0, Sizes(80, 1, 1)).train} for name in suspected(SUITE)[0]]
    assert not words[0] & words[1]
    places, mirrored = (EVERY[name].draw for name in ("places", "mirrored"))
    assert places is not None and mirrored is not None
    # The same picture gets another answer, unless it shows the middle of the middle lane.
    pairs = [(places(np.random.default_rng(seed)), mirrored(np.random.default_rng(seed))) for seed in range(40)]
    assert all(np.array_equal(one.frames[0], other.frames[0]) for one, other in pairs)
    assert all((one.target == other.target) == (one.target == "middle lane middle") for one, other in pairs)


class Contradicting:
    """A `RunCache` in which every training takes two seconds; contradicting domains miss their thresholds together."""

    conflict_cost = 0.02

    def __call__(self, adapter: Any) -> TrainingResult:
        low = {name for pair in suspected(SUITE) if set(pair) <= set(adapter) for name in pair}
        return TrainingResult({name: Score(*[0.1 if name in low else 1.0] * 2) for name in adapter}, 2.0)

    together = __call__

    def join(self, before: History, beside: Any, domain: str) -> TrainingResult:
        return self((*beside, domain))

    def conflicts(self, history: History, domains: Any) -> dict[frozenset[str], float]:
        return {frozenset(pair): 0.5 for pair in suspected(SUITE) if set(pair) <= set(domains)}


def test_a_training_is_counted_once_in_single_domain_trainings() -> None:
    cache: Any = Contradicting()
    meter = Meter(cache)
    for _ in range(2):
        meter(("a",))
        meter.together(["a"])  # the same as in sequence
        meter(("a", "b"))
        meter.together(["b", "a", "c"])
        meter.join(History(("a", "b", "c")), ("a",), "b")
    assert meter.trainings == 1 + 1 + 3 + 1 and meter.seconds == 2 * 4
    meter.conflicts(History(("a", "b")), ["a", "b"])
    assert meter.trainings == pytest.approx(6.04) and 8 < meter.seconds < 9


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


def results(*tables: dict[str, Any]) -> dict[str, Measured]:
    return {f"table-{place}": Measured([], {"tables": each}) for place, each in enumerate(tables)}


def test_missed_thresholds_are_counted_on_test_data(tmp_path: Path) -> None:
    def goals(*tables: dict[str, Any]) -> Any:
        return packing_bench.goals(packing_bench.combine(results(*tables)))

    tables = [a_table(seed, 0.81 if seed else 0.79) for seed in (0, 1, 2)]
    first = packing_bench.combine(results(*tables))
    rows = [row for row in first.rows if row["method"] == DEFAULT]
    assert [(row["seed"], row["broken"], round(row["worst"], 3)) for row in rows] == [
        (0, 1, -0.01),
        (1, 0, 0.01),
        (2, 0, 0.01),
    ]
    assert [row["a"] for row in first.rows if row["method"] == "(threshold)"] == [0.8] * 3
    more, cost, broken, all_in_one = goals(*tables)
    assert (more.value, cost.value, broken.value, all_in_one.value) == (2, pytest.approx(1.75), 1, 1)
    assert (more.goal, cost.goal, all_in_one.goal, all_in_one.at_most) == (1, 2, 1, False)
    assert broken.goal == pytest.approx(0.3) and "of 6 at 0.95" in broken.name
    tables[0]["missed alone"] = ["a"]  # it counts, too
    assert goals(*tables)[2] == broken
    for table in tables:  # beyond six domains the lower bound stands for the optimum
        del table["methods"][OPTIMUM]
    assert goals(*tables)[0].value == 1


def numbers(lora: LoraPlan) -> int:
    """Two layers of the embedded model's widths: one sharded by outputs, one by inputs."""
    return lora.rank * (256 + 640 // lora.blocks) + lora.rank * (640 // lora.blocks + 256)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_no_other_rank_has_a_parameter_count_nearer_to_the_loras(blocks: int) -> None:
    rank = adapters.matched_rank(numbers, blocks)
    wanted = numbers(LoraPlan(rank=adapters.RANK))
    found = abs(numbers(LoraPlan(rank=rank, blocks=blocks)) - wanted)
    assert rank % blocks == 0 and (rank == adapters.RANK if blocks == 1 else rank > adapters.RANK)
    for other in (rank - blocks, rank + blocks):
        assert abs(numbers(LoraPlan(rank=other, blocks=blocks)) - wanted) >= found


def test_samples_are_encoded_before_a_training_is_timed(base: str) -> None:
    plan, splits = small.plan_of(base, ("colors",)), {"colors": small.color_splits()}
    trainer = adapters.trainer_of(plan, small.trainer_of(plan, splits).adapter.base, splits)
    assert vars(trainer.domains["colors"]).keys() >= {"train", "validation", "test"}
