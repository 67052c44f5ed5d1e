"""The embedded model's training and exam, with few steps of small batches."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from fusion.data.samples import Sample, Splits
from fusion.embedded import exam, world
from fusion.embedded.exam import accuracy_by_skill
from fusion.synthetic.sources import BUILT_IN, load_source
from fusion.teachers.built_in import Learner
from fusion.training.trainer import LoraTrainer
from tests.fusion.small import write_base
from tools.embedded_model import contact_sheet, unlearned_words
from tools.embedded_model import train as training
from tools.embedded_model.train import Budget, Trainer, train
from vlora.config import EngineConfig, Quantize

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> object:
    patch = pytest.MonkeyPatch()
    for name, size in (("STILLS", 4), ("CLIPS", 2), ("VISION_BATCH", 8)):
        patch.setattr(training, name, size)
    patch.setattr(unlearned_words, "NUM_SCENES", 50)  # enough for the words of a checkpoint that is not used
    torch.set_num_threads(1)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    train(out, Budget(STEPS, None))
    return out


@pytest.mark.exhaustive
@pytest.mark.timeout(900)  # for a busy machine
def test_a_resumed_run_gives_the_same_weights(whole: Path, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, Budget(STEPS, None), torch.device("cpu"), 0)
    for _ in range(2):  # one step of each stage
        trainer.advance()
    trainer.save()
    train(tmp_path, Budget(STEPS, None))
    first, second = (torch.load(out / "training.pt", weights_only=True)["model"] for out in (whole, tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)
    fresh = Trainer(tmp_path, Budget(STEPS, None), torch.device("cpu"), 0).model.state_dict()
    assert any(not torch.equal(fresh[name], first[name]) for name in first)


@pytest.mark.exhaustive
def test_the_checkpoint_loads_in_transformers(whole: Path) -> None:
    processor = AutoProcessor.from_pretrained(whole)
    model = AutoModelForImageTextToText.from_pretrained(whole)
    assert sum(file.stat().st_size for file in whole.glob("*.safetensors")) < 12e6
    assert model.config.model_type == "llava" and processor.tokenizer.chat_template
    found = accuracy_by_skill(whole, num_scenes=8, seed=1)
    assert found["overall"].num_questions > 30 and found["overall"].share < 0.5  # three steps are not enough to learn


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (training.main, ["--steps", "-3"], "-3 was given; it must be finite and above 0"),
        (training.main, ["--minutes", "nan"], "nan was given"),
        (training.main, ["--minutes", "soon"], "invalid float value: 'soon'"),
        (training.main, ["--threads", "0"], "0 was given"),
        (training.main, ["--device", "cuda:9"], "'cuda:9' was requested"),
        (contact_sheet.main, ["nowhere/page.jpg"], "No such file or directory"),
        (contact_sheet.main, ["page.txt"], "unknown file extension"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    main: Callable[[], object], arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.torch.cuda, "is_available", lambda: False)
    where = ["--out", str(tmp_path / "run"), *arguments] if main is training.main else [str(tmp_path / arguments[0])]
    monkeypatch.setattr("sys.argv", ["command", *where])
    with contextlib.redirect_stderr(io.StringIO()) as printed, pytest.raises(SystemExit, match="2"):
        main()
    assert message in printed.getvalue() and not list(tmp_path.iterdir())


class Guess(Learner):
    """Always the first."""

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

    def train(trainer: LoraTrainer, name: str, beside: Sequence[str]) -> tuple[float, ...]:
        assert vars(trainer.domains[name]).keys() >= {"train", "validation", "test"}, "encoded before it is timed"
        return trains(trainer, name, beside)

    trains = LoraTrainer.train
    monkeypatch.setattr(LoraTrainer, "train", train)
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
    quantize: Quantize, has_goal: bool, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"none": lambda question: question.answer, quantize: lambda question: "yes"}
    formats: list[str] = []

    def answered(config: EngineConfig, asked: Sequence[tuple[list[Image.Image], world.Question]]) -> list[str]:
        own = engine_answers(config, asked)
        assert len(own) == len(asked) and config.quantize_head == (config.quantize != "none")
        formats.append(config.quantize)
        return [answers[config.quantize](question) for _, question in asked]

    engine_answers = exam.answers_of
    monkeypatch.setattr(exam, "answers_of", answered)
    rows, gates = exam.compare(base, quantize, quantize_head=True, seeds=(1,), num_scenes=4, say=lambda _: None)
    assert formats == ["none", quantize]
    by_skill = {row.skill: row for row in rows}
    yes = by_skill["yes or no"]
    assert yes.right == 1 and 0 < yes.quantized < 1 and yes.lost_points == pytest.approx(100 * (1 - yes.quantized))
    assert yes.same == yes.quantized
    assert by_skill["overall"].num_questions == sum(row.num_questions for row in rows[:-1])
    assert [gate.name for gate in gates] == ["points lost in int8"] * has_goal
    if has_goal:
        assert gates[0].value == by_skill["overall"].lost_points > gates[0].goal and gates[0].at_most
