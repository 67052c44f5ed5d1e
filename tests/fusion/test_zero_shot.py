"""Answers of the base model before training: equal to the engine's, and from the same model instance as training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForImageTextToText

from fusion.commands import fuse
from fusion.data.samples import Sample, Splits
from fusion.embedded import checkpoint_path
from fusion.training.zero_shot import decode_in_parts, score_before_training
from tests.fusion.small import (
    ask_engine,
    color_splits,
    colors,
    plan_of,
    texts_of,
    trainer_of,
    write_base,
    write_folders,
)
from vlora.types import SamplingParams

pytestmark = pytest.mark.slow

LIMIT = 6


def clips() -> Splits:
    """Two frames each, and questions of two lengths."""
    single = colors(16, 5)
    samples = [
        Sample((one.frames[0], other.frames[0]), "red", "what is it ?" if place % 2 else "")
        for place, (one, other) in enumerate(zip(single[::2], single[1::2], strict=True))
    ]
    return Splits("vqa", (), samples, samples, samples, real=False)


@pytest.mark.parametrize("make", [color_splits, clips])
def test_answers_equal_the_engines(make: Callable[[], Splits]) -> None:
    splits, base = make(), checkpoint_path()  # random weights give no meaningful answers
    domain = trainer_of(plan_of(base, ("fields",)), {"fields": splits}).domains["fields"]
    expected = texts_of(base, ask_engine(base, domain, sampling=SamplingParams(max_tokens=LIMIT)))
    answers = decode_in_parts(domain, domain.test, LIMIT)
    assert answers == expected
    assert len(set(answers)) > 1  # otherwise the comparison is meaningless


def test_decoding_continues_in_smaller_parts_when_memory_runs_out(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    domain = trainer_of(plan_of(base, ("fields",)), {"fields": color_splits()}).domains["fields"]
    whole, score = decode_in_parts(domain, domain.test, LIMIT), score_before_training(domain)
    decode = domain.base.decode_answers
    sizes: list[int] = []

    def short(samples: list[object], limit: int) -> list[str]:
        sizes.append(len(samples))
        if len(samples) > 8:
            raise torch.OutOfMemoryError
        return decode(samples, limit)  # type: ignore[arg-type]

    monkeypatch.setattr(domain.base, "decode_answers", short)
    assert decode_in_parts(domain, domain.test, LIMIT) == whole
    assert sizes == [30, 16, 8, 8, 8, 6]
    assert score_before_training(domain) == score


def test_a_run_has_one_base_model_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = AutoModelForImageTextToText.from_pretrained

    def counted(name: str, **settings: object) -> object:
        loaded.append(name)
        return load(name, **settings)

    folder = write_base(tmp_path / "base")
    write_folders(tmp_path / "colors")
    (tmp_path / "plan.yaml").write_text(
        "base: base\nconfidence: null\ntraining: {steps: 1, batch_size: 4}\nlora: {rank: 2}\n"
        "domains: [{name: colors, source: colors, question: what color, threshold: 0.1}]\n"
    )
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", counted)
    report = fuse(tmp_path / "plan.yaml", tmp_path / "out", console=Console(quiet=True))
    assert loaded == [folder]
    assert 0 <= report.domains[0].before <= 1
