"""The real trainer on real conflicts: contradictory domains are separated, equal domains share an adapter."""

from __future__ import annotations

import pytest

from fusion.data.samples import Sample, Splits
from fusion.packing.algorithm import by_value, pack, pack_in_sequence
from fusion.packing.joint import pack_jointly
from fusion.training.checkpoint import Checkpoint
from fusion.training.run_cache import RunCache
from tests.fusion.small import COLORS, color_splits, plan_of, trainer_of

pytestmark = pytest.mark.slow


def in_words(labels: dict[int, int] | None = None) -> Splits:
    """Answers in words, so that two domains differ only in the correct answers."""
    plain = color_splits(labels)

    def words(samples: object) -> list[Sample]:
        return [Sample(s.frames, COLORS[s.target]) for s in samples]  # type: ignore[attr-defined]

    return Splits("vqa", (), words(plain.train), words(plain.validation), words(plain.test), real=False)


@pytest.fixture(scope="module")
def trainings(base: str, tmp_path_factory: pytest.TempPathFactory) -> RunCache:
    """The same pictures and prompt in three domains; in one of them every colour has another colour's name."""
    plan = plan_of(base, ("colors", "copy", "contrary"), steps=50, batch_size=10, learning_rate=4e-3)
    contrary = in_words({0: 1, 1: 2, 2: 0})
    trainer = trainer_of(plan, {"colors": in_words(), "copy": in_words(), "contrary": contrary})
    return RunCache(trainer, Checkpoint(tmp_path_factory.mktemp("made"), {}, resume=False), rehearsal=0.5)


# An answer is correct in one domain and wrong in the other: the accuracies sum to 1 at most; chance is a third.
THRESHOLDS = {"colors": 0.6, "copy": 0.6, "contrary": 0.6}


def test_contradictory_domains_force_a_rollback(trainings: RunCache) -> None:
    packing = pack(("colors", "contrary"), THRESHOLDS, trainings)
    assert packing is not None
    assert list(packing.adapters) == [("colors",), ("contrary",)]
    assert not packing.missed
    (rollback,) = packing.rollbacks
    assert (rollback.domains, rollback.into) == (("contrary",), ("colors",)) and rollback.broken
    naive = pack_in_sequence(("colors", "contrary"), THRESHOLDS, by_value(trainings))
    assert len(naive.adapters) == 2 and len(naive.rollbacks) == 1


@pytest.mark.exhaustive
def test_joint_packing_separates_contradictory_domains(trainings: RunCache) -> None:
    packing = pack_jointly(("colors", "copy", "contrary"), THRESHOLDS, trainings.together)
    assert list(packing.adapters) == [("colors", "copy"), ("contrary",)]
    assert not packing.missed and packing.rollbacks[0].domains == ("colors", "contrary", "copy")


def test_two_copies_of_a_domain_share_an_adapter(trainings: RunCache) -> None:
    packing = pack(("colors", "copy"), THRESHOLDS, trainings)
    assert packing is not None
    assert list(packing.adapters) == [("colors", "copy")]
    assert not packing.rollbacks and not packing.missed
