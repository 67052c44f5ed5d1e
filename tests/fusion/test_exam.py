"""`vlora model eval` end to end, with an untrained model and minimal settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from fusion.data.samples import Sample, Splits
from fusion.embedded import exam
from fusion.synthetic.sources import BUILT_IN, load_source
from tests.fusion.small import write_base


class Guess:
    name = "always the first"

    def fit(self, splits: Splits) -> None:
        pass

    def answers(self, samples: Sequence[Sample]) -> list[object]:
        return [() if isinstance(sample.target, tuple) else 0 for sample in samples]


@pytest.mark.slow
def test_every_domain_and_goal_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_base(tmp_path)

    def few(source: str, seed: int) -> Splits:
        splits = load_source(source, seed)
        parts = {part: getattr(splits, part)[:4] for part in ("train", "validation", "test")}
        return dataclasses.replace(splits, **parts)

    monkeypatch.setattr(exam, "load_source", few)
    monkeypatch.setattr(exam, "TEACHERS", dict.fromkeys(exam.TEACHERS, Guess))
    monkeypatch.setattr(exam, "STEPS", 1)
    monkeypatch.setattr(exam, "TIMED", 1)
    rows, gates = exam.examine(str(tmp_path), seeds=(1,), num_scenes=16, say=lambda _: None)
    assert set(exam.QUESTIONS) <= set(BUILT_IN)
    assert {row.what for row in rows} >= {*exam.QUESTIONS, *exam.GATED_SKILLS, "overall"}
    names = [gate.name for gate in gates]
    assert len(set(names)) == len(names)
    for source in exam.QUESTIONS:
        assert any(name.startswith(source) for name in names)
    assert {gate.name: gate.goal for gate in gates}["drawn-traffic-detection: F1"] == 0.6
    assert all(0 <= row.right <= 1 and 0 <= row.without <= 1 for row in rows)
