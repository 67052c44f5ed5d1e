"""The real trainer on real conflicts: what contradicts is told apart, and what is the same shares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusion.checkpoint import Checkpoint
from fusion.pack import by_value, pack, pack_in_sequence
from fusion.samples import Sample, Splits
from fusion.trainings import Trainings
from tests.fusion.small import COLORS, color_splits, plan_of, trainer_of, write_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return write_base(tmp_path_factory.mktemp("base"))


def in_words(told: dict[int, int] | None = None) -> Splits:
    """The language model's own head answers: two domains then differ in nothing but what is right."""
    plain = color_splits(told)

    def words(samples: object) -> list[Sample]:
        return [Sample(s.frames, COLORS[s.target]) for s in samples]  # type: ignore[attr-defined]

    return Splits("vqa", (), words(plain.train), words(plain.validation), words(plain.test), real=False)


def trainings_of(base: str, folder: Path, second: dict[int, int] | None) -> Trainings:
    plan = plan_of(base, ("first", "second"), steps=50, batch_size=10, learning_rate=4e-3)
    trainer = trainer_of(plan, {"first": in_words(), "second": in_words(second)})
    return Trainings(trainer, Checkpoint(folder, {}, resume=False), rehearsal=0.5)


THRESHOLDS = {"first": 0.7, "second": 0.7}


def test_contradictory_domains_force_a_rollback(base: str, tmp_path: Path) -> None:
    """The same pictures and prompt, but every colour is called by another's name: one adapter cannot say both."""
    trainings = trainings_of(base, tmp_path, {0: 1, 1: 2, 2: 0})
    packing = pack(("first", "second"), THRESHOLDS, trainings)
    assert packing is not None
    assert list(packing.adapters) == [("first",), ("second",)]
    assert not packing.missed
    (rollback,) = packing.rollbacks
    assert (rollback.domain, rollback.into) == ("second", ("first",)) and rollback.broken
    naive = pack_in_sequence(("first", "second"), THRESHOLDS, by_value(trainings))
    assert len(naive.adapters) == 2 and len(naive.rollbacks) == 1


def test_two_copies_of_a_domain_never_do(base: str, tmp_path: Path) -> None:
    packing = pack(("first", "second"), THRESHOLDS, trainings_of(base, tmp_path, None))
    assert packing is not None
    assert list(packing.adapters) == [("first", "second")]
    assert not packing.rollbacks and not packing.missed
