"""Finished trainings on disk: written atomically, and used only by runs with the same identity."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fusion.data.samples import Sample, Splits
from fusion.embedded.model import build_model
from fusion.embedded.processor import build_processor
from fusion.packing.algorithm import Score, TrainingResult
from fusion.plan.schema import DomainPlan, Plan
from fusion.training.checkpoint import Checkpoint
from fusion.training.fingerprint import hash_of_processing, identity_of
from vlora.errors import BadPlan
from vlora.models import InputProcessor

TRAINED = TrainingResult({"a": Score(0.1 + 0.2, 1 / 3)}, 1.5, (2.0, 0.1))
STATE = {"lora.x": torch.randn(3, 4), "head.a.weight": torch.randn(4, 2).t()}


def test_a_stored_training_is_found_by_the_next_process(tmp_path: Path) -> None:
    Checkpoint(tmp_path, {"plan": "1"}, resume=False).keep("a, b", TRAINED, STATE)
    again = Checkpoint(tmp_path, {"plan": "1"}, resume=True)
    assert again.trained("a, b") == TRAINED
    assert all(torch.equal(value, STATE[name]) for name, value in again.state("a, b").items())
    assert again.trained("a") is None


def test_without_resume_an_earlier_run_is_deleted(tmp_path: Path) -> None:
    Checkpoint(tmp_path, {"plan": "1"}, resume=False).keep("a", TRAINED, STATE)
    assert Checkpoint(tmp_path, {"plan": "1"}, resume=False).trained("a") is None


def test_resume_without_an_earlier_run_starts_one(tmp_path: Path) -> None:
    Checkpoint(tmp_path / "new", {"plan": "1"}, resume=True).keep("a", TRAINED, STATE)
    assert Checkpoint(tmp_path / "new", {"plan": "1"}, resume=True).trained("a") == TRAINED


def test_a_process_that_dies_while_writing_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the last rename: for the next process the training does not exist."""
    checkpoint = Checkpoint(tmp_path, {"plan": "1"}, resume=False)

    def die(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", die)
        checkpoint.keep("a", TRAINED, STATE)
    again = Checkpoint(tmp_path, {"plan": "1"}, resume=True)
    assert again.trained("a") is None
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_a_training_may_be_stored_twice(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {"plan": "1"}, resume=False)
    checkpoint.keep("a", TRAINED, STATE)
    checkpoint.keep("a", TRAINED, STATE)
    assert checkpoint.trained("a") == TRAINED
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("text", ["", "[]", "{", '{"scores": [1]}'])
@pytest.mark.parametrize("name", ["run.json", "trained.json", "state.safetensors"])
def test_files_damaged_by_other_programs_are_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    Checkpoint(tmp_path, {"plan": "1"}, resume=False).keep("a", TRAINED, STATE)
    (file,) = tmp_path.rglob(name)
    file.write_text(text)
    with pytest.raises(BadPlan, match=rf"{file} is damaged|cannot be resumed"):
        again = Checkpoint(tmp_path, {"plan": "1"}, resume=True)
        again.trained("a")
        again.state("a")


def splits(value: int) -> Splits:
    sample = Sample((np.full((4, 4, 3), value, np.uint8),), 0)
    return Splits("classification", ("x", "y"), [sample], [sample], [sample], real=False)


def test_a_changed_plan_or_changed_data_is_refused_by_name(tmp_path: Path) -> None:
    domain = DomainPlan(name="signs", source="made", question="what?", threshold=0.8)
    plan = Plan(domains=(domain,))
    steps = plan.training.model_copy(update={"steps": 7})
    identity = identity_of(plan, {"signs": splits(0)}, "w", "p", "cpu")
    Checkpoint(tmp_path, identity, resume=False).keep("a", TRAINED, STATE)
    for changed, message in (
        (identity_of(plan, {"signs": splits(1)}, "w", "p", "cpu"), "data of signs: was"),
        (
            identity_of(plan.model_copy(update={"training": steps}), {"signs": splits(0)}, "w", "p", "cpu"),
            "plan's training.steps: was 300, is 7",
        ),
        (identity_of(plan, {"signs": splits(0)}, "other", "p", "cpu"), "weights of the base: was w, is other"),
        (identity_of(plan, {"signs": splits(0)}, "w", "other", "cpu"), "processing of the base: was p, is other"),
        (identity_of(plan, {"signs": splits(0)}, "w", "p", "cuda"), "device: was cpu, is cuda"),
        (identity | {"format of heads": "4"}, "format of heads: was 3, is 4"),
    ):
        with pytest.raises(BadPlan, match="cannot be resumed") as refused:
            Checkpoint(tmp_path, changed, resume=True)
        assert message in str(refused.value)
        assert len(str(refused.value).splitlines()) == 3  # only this difference
    assert Checkpoint(tmp_path, identity, resume=True).trained("a") == TRAINED


def test_labels_that_a_teacher_does_not_choose_are_no_difference() -> None:
    """`only` is newer than trainings that can be resumed."""
    cascade = DomainPlan(name="a", source="x", question="q", threshold=0.5, teacher={"kind": "cascade"})  # type: ignore[arg-type]
    assert not any("only" in field for field in identity_of(Plan(domains=(cascade,)), {}, "w", "p", "cpu"))


def test_other_processing_of_pictures_is_another_base(tmp_path: Path) -> None:
    first, moved_copy = tmp_path / "first", tmp_path / "moved"
    build_processor().save_pretrained(str(first))
    build_model(seed=0).config.save_pretrained(str(first))
    shutil.copytree(first, moved_copy)
    processor = InputProcessor.from_pretrained(str(first))
    before = hash_of_processing(processor)
    assert hash_of_processing(InputProcessor.from_pretrained(str(moved_copy))) == before
    processor.tokenizer.chat_template += " "
    template = hash_of_processing(processor)
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    assert len({before, template, hash_of_processing(processor)}) == 3
