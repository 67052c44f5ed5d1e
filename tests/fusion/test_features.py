"""Image features on disk: memory does not grow with the number of samples."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fusion.data.samples import Splits
from fusion.training.features import FeatureCache
from fusion.training.frozen_base import FrozenBase
from tests.fusion.small import COLORS, colors, plan_of, trainer_of, write_base
from vlora.models.vision.encoder import VisionEncoder

_AT_ONCE = 8


def test_pictures_of_a_sample_come_back_together(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, "tower")
    rows = [torch.randn(count, 4) for count in (3, 1, 2)]
    samples = [["a", "b"], ["c"]]
    assert cache.get(samples) is None
    cache.put(samples, rows)
    found = cache.get(samples)
    assert found is not None
    assert torch.equal(found[0].rows(), torch.cat(rows[:2])) and torch.equal(found[1].rows(), rows[2])
    assert FeatureCache(tmp_path, "another").get(samples) is None


@pytest.mark.parametrize("number", [16, 48])
def test_features_held_do_not_grow_with_samples(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak bytes of features in memory while samples are prepared, trained and scored."""
    alive: dict[int, int] = {}
    most = 0
    shape: list[int] = []

    def watch(made: Sequence[torch.Tensor]) -> None:
        nonlocal most
        for rows in made:
            alive[id(rows)] = rows.nbytes
            weakref.finalize(rows, alive.pop, id(rows), None)
            shape[:] = rows.shape
        most = max(most, sum(alive.values()))

    encode, features = VisionEncoder.encode, FrozenBase.features_of

    def encoded(self: VisionEncoder, tasks: Sequence[object]) -> object:
        found = encode(self, tasks)  # type: ignore[arg-type]
        watch([one.rows for one in found])
        return found

    def read(self: FrozenBase, batch: Sequence[object]) -> list[torch.Tensor]:
        found = features(self, batch)  # type: ignore[arg-type]
        watch(found)
        return found

    monkeypatch.setattr(VisionEncoder, "encode", encoded)
    monkeypatch.setattr(FrozenBase, "features_of", read)
    monkeypatch.setattr("fusion.training.frozen_base.ENCODE_AT_ONCE", _AT_ONCE)
    monkeypatch.setattr("fusion.training.scoring.SCORE_AT_ONCE", _AT_ONCE)
    torch.set_num_threads(1)
    plan = plan_of(write_base(tmp_path / "base"), ("colors",), steps=2, batch_size=_AT_ONCE)
    train, validation, test = (colors(count, seed) for seed, count in enumerate((number, number, 4)))
    splits = Splits("classification", COLORS, train, validation, test, real=False)
    trainer = trainer_of(plan, {"colors": splits}, tmp_path / "features")
    assert not alive
    trainer.adapter.reset()
    trainer.train("colors", ())
    trainer.evaluator.score("colors", trainer.domains["colors"].validation)
    assert not alive
    one = shape[0] * shape[1] * 4
    assert one <= most <= 2 * _AT_ONCE * one
