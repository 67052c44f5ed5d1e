"""`vlora model eval` end to end, with an untrained model and minimal settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from fusion.data.samples import Sample, Splits
from fusion.embedded import exam, quantized_exam, world
from fusion.synthetic.sources import BUILT_IN, load_source
from tests.fusion.small import write_base
from vlora.config import EngineConfig, Quantize


class Guess:
    name = "always the first"

    def fit(self, splits: Splits) -> None:
        pass

    def answers(self, samples: Sequence[Sample]) -> list[object]:
        return [() if isinstance(sample.target, tuple) else 0 for sample in samples]


@pytest.mark.exhaustive
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


@pytest.mark.parametrize(("quantize", "has_goal"), [("int8", True), ("int4", False)])
def test_answers_of_quantized_weights_are_compared(
    quantize: Quantize, has_goal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_base(tmp_path)
    answers = {"none": lambda question: question.answer, quantize: lambda question: "yes"}
    formats: list[str] = []

    def answered(config: EngineConfig, asked: Sequence[tuple[list[Image.Image], world.Question]]) -> list[str]:
        own = engine_answers(config, asked)
        assert len(own) == len(asked) and config.quantize_head == (config.quantize != "none")
        formats.append(config.quantize)
        return [answers[config.quantize](question) for _, question in asked]

    engine_answers = quantized_exam.answers_of
    monkeypatch.setattr(quantized_exam, "answers_of", answered)
    rows, gates = quantized_exam.compare(
        str(tmp_path), quantize, quantize_head=True, seeds=(1,), num_scenes=4, say=lambda _: None
    )
    assert formats == ["none", quantize]
    by_skill = {row.skill: row for row in rows}
    yes = by_skill["yes or no"]
    assert yes.right == 1 and 0 < yes.quantized < 1 and yes.lost_points == pytest.approx(100 * (1 - yes.quantized))
    assert yes.same == yes.quantized
    assert by_skill["overall"].num_questions == sum(row.num_questions for row in rows[:-1])
    assert [gate.name for gate in gates] == ["points lost in int8"] * has_goal
    if has_goal:
        assert gates[0].value == by_skill["overall"].lost_points > gates[0].goal and gates[0].at_most
