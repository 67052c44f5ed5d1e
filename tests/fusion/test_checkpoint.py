"""Finished trainings on disk: written atomically, and used only by runs with the same identity."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
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
from fusion.training.resume_hint import UNFINISHED, ResumeHint, same_command
from tests.fusion.small import write_base, write_folders
from tests.processes import until
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


ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "vlora.cli"]


def finish(out: Path, *names: str) -> None:
    for name in names:
        (out / "checkpoint" / name).mkdir(parents=True)
        (out / "checkpoint" / name / "trained.json").write_text("{}")


def test_finished_trainings_are_counted_on_each_access(tmp_path: Path) -> None:
    hint = ResumeHint(tmp_path, restart=False)
    assert (str(hint), hint.option) == ("no training was finished", "--resume")
    finish(tmp_path, "a")
    finish(tmp_path, "unfinished-1-b")  # killed after it wrote its files, before it renamed the folder
    assert str(hint) == f"1 finished training kept in {tmp_path}/checkpoint"
    finish(tmp_path, "c")
    assert str(hint) == f"2 finished trainings kept in {tmp_path}/checkpoint"


def test_the_hint_depends_on_whether_an_earlier_run_was_deleted(tmp_path: Path) -> None:
    finish(tmp_path, "of an earlier run")
    hint = ResumeHint(tmp_path, restart=True)
    assert (str(hint), hint.option) == ("nothing was deleted or trained yet", "--restart")
    hint.mark_cleared()
    assert hint.option == "--resume"


def test_the_command_differs_in_one_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    typed = ["fuse", "my plan.yaml", "--restart", "--out", "out"]
    module = same_command(["/lib/vlora/cli/__main__.py", *typed], "--resume")
    assert module == f"{shlex.quote(sys.executable)} -m vlora.cli fuse 'my plan.yaml' --out out --resume"
    script = tmp_path / "vlora"
    script.touch(mode=0o755)
    assert same_command([str(script), "fuse", "p", "--resume"], "--resume") == f"{script} fuse p --resume"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert same_command([str(script), "fuse", "p"], "--resume") == "vlora fuse p --resume"
    assert same_command([str(script), "fuse", "p", "--resume"], "--restart") == "vlora fuse p --restart"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    write_base(folder / "base")
    domains = ""
    for name in ("colors", "others", "more"):
        write_folders(folder / name)
        promise = "{relative_to: alone, minus: 0.99}"  # each domain is trained alone, in forks
        domains += f'  - {{name: {name}, source: {name}, question: "what is it ?", threshold: {promise}}}\n'
    (folder / "a plan.yaml").write_text(
        f"base: base\nconfidence: null\nlora: {{rank: 2}}\ntraining: {{steps: 50, batch_size: 4}}\ndomains:\n{domains}"
    )
    return folder


def trained(out: Path) -> dict[Path, int]:
    found = (out / "checkpoint").glob("*/trained.json")
    return {file: file.stat().st_mtime_ns for file in found if not file.parent.name.startswith(UNFINISHED)}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "word", "options"),
    [
        (signal.SIGINT, 130, "interrupted", ("--restart",)),
        (signal.SIGTERM, 143, "terminated", ("--workers", "2")),
    ],
)
def test_the_last_line_of_a_stopped_run_resumes_it(
    made: Path, number: signal.Signals, code: int, word: str, options: tuple[str, ...]
) -> None:
    out = made / word
    command = [*COMMAND, "fuse", "a plan.yaml", "--out", word, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, cwd=made, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: bool(trained(out)) or run.poll() is not None, 120)
    run.send_signal(number)
    _, told = run.communicate(timeout=60)
    assert run.returncode == code, told
    finished = trained(out)
    count = "1 finished training" if len(finished) == 1 else f"{len(finished)} finished trainings"
    assert told.startswith(f"{word}: {count} kept in {word}/checkpoint; resume with: ") and told.count("\n") == 1, told
    again = told.partition("; resume with: ")[2].rstrip()
    assert again.endswith(" --resume") and "--restart" not in again
    done = subprocess.run(again, shell=True, cwd=made, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert trained(out).items() > finished.items()  # three alone and all at once, none repeated
    assert len(trained(out)) == 4 and (out / "report.json").exists()
