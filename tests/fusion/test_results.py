"""A run's folder: finished trainings and results belong to one run, and are never deleted without --restart."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fusion.data.samples import Sample, Splits
from fusion.folder import UNFINISHED, ResumeHint, refuse_foreign, refuse_to_overwrite, replace_results, same_command
from fusion.packing.algorithm import Score
from fusion.plan.schema import DomainPlan, Plan
from fusion.run import fuse
from fusion.training.checkpoint import Checkpoint, Key
from fusion.training.fingerprint import ALL, Inputs, hash_of_processing, inputs_of
from tests.fusion.small import write_base, write_folders
from tests.processes import until
from tools.embedded_model.model import build_model
from tools.embedded_model.processor import build_processor
from vlora.errors import BadConfig, BadPlan
from vlora.models.processing import InputProcessor
from vlora.run_folder import lock_folder, remove, whole

PLAN = "domains:\n  - {name: a, source: /nowhere, question: q, threshold: 0.5}\n"


def write(folder: Path, content: str, adapter: str = "signs") -> None:
    for name in (f"adapters/{adapter}", "test/signs"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(content)
    (folder / "report.html").write_text(content)
    report = {"adapters": [{"name": adapter}], "domains": [{"name": "signs"}], "content": content}
    (folder / "report.json").write_text(json.dumps(report))


def contents(out: Path) -> set[str]:
    files = {file for file in out.rglob("*") if file.is_file()}
    reports = {file for file in files if file.name == "report.json"}
    return {file.read_text() for file in files - reports} | {json.loads(one.read_text())["content"] for one in reports}


def finish(out: Path, *names: str) -> None:
    """Trainings of a run that was stopped."""
    for name in names:
        (out / "checkpoint" / name).mkdir(parents=True)
        (out / "checkpoint" / name / "trained.json").write_text("{}")
    (out / "checkpoint" / "packing.json").write_text("{}")


ONE, TWO = f"{1:024x}", f"{2:024x}"


# -- results -----------------------------------------------------------------------------------------------------------


def test_results_replace_those_of_an_earlier_run_whole_or_not_at_all(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with replace_results(tmp_path) as folder:
            write(folder, content)
            assert contents(tmp_path) >= {content}
        assert contents(tmp_path) == {content}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapters", "report.html", "report.json", "test"]
    with pytest.raises(OSError, match="disk full"), replace_results(tmp_path) as folder:
        (folder / "adapters").mkdir()
        raise OSError("disk full")
    assert all((tmp_path / name).exists() for name in ("adapters/signs/file", "test/signs/file", "report.html"))


@pytest.mark.parametrize("stop_at", ["adapters", "test", "report.html"])
def test_an_interrupted_replacement_leaves_no_report_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: str
) -> None:
    """The adapters of both runs, which may be mixed, have different names."""
    write(tmp_path, "first", adapter="signs-digits")

    def interrupted(path: Path, remove: Callable[[Path], None] = remove) -> None:
        if path.name == stop_at:
            raise KeyboardInterrupt
        remove(path)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("fusion.folder.remove", interrupted)
        with replace_results(tmp_path) as folder:
            write(folder, "second")
    assert not (tmp_path / "report.json").exists()
    refuse_foreign(tmp_path)
    with replace_results(tmp_path) as folder:
        write(folder, "third")
    assert contents(tmp_path) == {"third"}


def test_an_earlier_run_is_deleted_only_with_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, out, other = tmp_path / "plan.yaml", tmp_path / "out", tmp_path / "other"
    plan.write_text(PLAN)
    refuse_to_overwrite(out)
    for name, words in ((ONE, "1 finished training of"), (TWO, "2 finished trainings of")):
        finish(out, name)
        with pytest.raises(BadConfig, match=rf"{words} a run that was stopped; give --resume .* --restart"):
            refuse_to_overwrite(out)
    write(out, "first")
    with pytest.raises(BadConfig, match=r"results of a run that finished on 20.*--restart to train everything again"):
        fuse(plan, out)  # before the plan's data is read
    with pytest.raises(BadConfig, match="only one of the two"):
        fuse(plan, out, resume=True, restart=True)
    assert contents(out) >= {"first"}

    def another_run_ends(*_: object) -> SimpleNamespace:
        finish(other, ONE)
        return SimpleNamespace(data={})

    monkeypatch.setattr("fusion.run.check_plan", another_run_ends)
    with pytest.raises(BadConfig, match="1 finished training of a run that was stopped"):
        fuse(plan, other)


OWN = ("checkpoint/model.safetensors", "features/own.npy", "adapters/own/adapter_config.json", "test/red/0.png")


@pytest.mark.parametrize("name", [*OWN, "report.html", "report.json", "adapters"])
def test_files_that_no_run_wrote_are_never_deleted(tmp_path: Path, name: str) -> None:
    plan, file = tmp_path / "plan.yaml", tmp_path / name
    plan.write_text(PLAN)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('["mine"]')
    for option in ({}, {"resume": True}, {"restart": True}):
        words = rf"{tmp_path} contains {name.split('/')[0]}.*, which `vlora fuse` did not write"
        with pytest.raises(BadConfig, match=words):
            fuse(plan, tmp_path, **option)  # type: ignore[arg-type]
        assert file.read_text() == '["mine"]'


def test_files_beside_those_of_a_run_are_never_deleted(tmp_path: Path) -> None:
    write(tmp_path, "first")
    finish(tmp_path, ONE)
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / f"{1:064x}.safetensors").touch()
    for name in ("adapters", "test", "checkpoint", "features"):
        refuse_foreign(tmp_path)
        (tmp_path / name / "own").touch()
        with pytest.raises(BadConfig, match=rf" contains {name}/ .own\), which"):
            refuse_foreign(tmp_path)
        with pytest.raises(BadConfig, match="did not write"), replace_results(tmp_path):
            pass
        assert (tmp_path / "adapters" / "signs" / "file").exists()
        (tmp_path / name / "own").unlink()


def test_a_second_process_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    out, (reads, writes) = tmp_path / "out", os.pipe()
    child = os.fork()
    if child == 0:
        with lock_folder(out):
            os.write(writes, b".")
            signal.pause()
    assert os.read(reads, 1)
    with pytest.raises(BadConfig, match=rf"out is in use by process {child} on .* since 20"), lock_folder(out):
        pass
    with lock_folder(tmp_path / "another"):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with lock_folder(out), pytest.raises(BadConfig, match="in use"), lock_folder(out):
        pass
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(BadConfig, match=rf"^{tmp_path}/file\S* cannot be created: .*; choose"), lock_folder(folder):
            pass


def test_what_a_killed_process_with_the_same_number_left_is_replaced(tmp_path: Path) -> None:
    """In a container, each process may have the number of the last one."""
    (tmp_path / f"{UNFINISHED}{os.getpid()}-new" / "old").mkdir(parents=True)
    with whole(tmp_path / "new") as part:
        part.mkdir()
    assert list(tmp_path.rglob("*")) == [tmp_path / "new"]


# -- finished trainings ------------------------------------------------------------------------------------------------

KEY, OTHER = (Key(what, {"": {"seed": "1"}, "a": {}}, what) for what in ("a, b", "a"))
LOSSES = (2.0, 0.1 + 0.2)
STATE = {"lora.x": torch.randn(3, 4), "head.a.weight": torch.randn(4, 2).t()}
SCORE = Score(0.1 + 0.2, 1 / 3)


def kept(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint(folder, resume=True)
    checkpoint.keep(KEY, 1.5, LOSSES, STATE)
    checkpoint.keep_measured(KEY, "score of a", SCORE)
    checkpoint.keep_packing([SCORE])
    return checkpoint


def test_a_stored_training_is_found_by_the_next_process_that_resumes(tmp_path: Path) -> None:
    for _ in range(2):  # a training may be stored twice; the folder may be new
        kept(tmp_path)
    again = Checkpoint(tmp_path, resume=True)
    assert again.trained(KEY) == (1.5, LOSSES) and again.trained(OTHER) is None
    assert again.measured(KEY, "score of a", Score) == SCORE and again.measured(KEY, "score of b", Score) is None
    assert again.packing(list[Score]) == [SCORE] and again.inputs() == [KEY.inputs]
    assert all(torch.equal(value, STATE[name]) for name, value in again.state(KEY).items())
    assert len(list(tmp_path.iterdir())) == 2
    empty = Checkpoint(tmp_path, resume=False)
    assert empty.trained(KEY) is None and empty.packing(list[Score]) is None


def test_a_process_that_dies_while_writing_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the last rename: for the next process the training does not exist."""
    checkpoint = Checkpoint(tmp_path, resume=False)

    def die(part: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", die)
        patched.setattr("vlora.run_folder.remove", lambda path: None)
        for keep in (lambda: checkpoint.keep(KEY, 1.5, LOSSES, STATE), lambda: checkpoint.keep_packing(SCORE)):
            with pytest.raises(KeyboardInterrupt):
                keep()
    assert len(list(tmp_path.iterdir())) == 2
    assert Checkpoint(tmp_path, resume=True).trained(KEY) is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["trained.json", "state.safetensors", "packing.json", "score"])
def test_files_damaged_by_other_programs_are_refused_by_name(tmp_path: Path, name: str) -> None:
    for place, text in enumerate(("", "[1]", "{", '{"losses": [1]}')):
        folder = tmp_path / str(place)
        kept(folder)
        named = ("trained.json", "state.safetensors", "packing.json")
        (file,) = (
            one for one in folder.rglob("*.*") if one.name == name or (name == "score" and one.name not in named)
        )
        file.write_text(text)
        with pytest.raises(BadPlan, match=rf"{file} is damaged"):
            again = Checkpoint(folder, resume=True)
            again.trained(KEY)
            again.state(KEY)
            again.measured(KEY, "score of a", Score)
            again.packing(list[Score])


def splits(*values: int) -> Splits:
    train, validation, test = ([Sample((np.full((4, 4, 3), value, np.uint8),), 0)] for value in values)
    return Splits("classification", ("x", "y"), train, validation, test, real=False)


def test_a_training_depends_on_what_it_learns_with_and_from_and_on_nothing_else() -> None:
    domain = DomainPlan(name="signs", source="made", question="what?", threshold=0.8)
    plan = Plan(domains=(domain,))

    def made(
        *, data: Sequence[int] = (0, 0, 0), base: tuple[str, str, str] = ("w", "p", "cpu"), **plans: Any
    ) -> Inputs:
        """base: its weights, its processing, and the device."""
        one = plans.pop("domain", {})
        changed = plan.model_copy(update={**plans, "domains": (domain.model_copy(update=one),)})
        return inputs_of(changed, {"signs": splits(*data)}, *base)

    before = made()
    for changed, where, names in (
        (made(data=(1, 0, 0)), "signs", ["training data"]),
        (made(domain={"question": "which?"}), "signs", ["question"]),
        (made(domain={"head": "words"}), "signs", ["head"]),
        (made(training=plan.training.model_copy(update={"steps": 7})), ALL, ["training.steps"]),
        (made(lora=plan.lora.model_copy(update={"blocks": 2})), ALL, ["lora.blocks"]),
        (made(seed=1), ALL, ["seed"]),
        (made(quantize="int8"), ALL, ["quantize"]),
        (made(base=("other", "p", "cpu")), ALL, ["weights of the base"]),
        (made(base=("w", "other", "cpu")), ALL, ["processing of the base"]),
        (made(base=("w", "p", "cuda")), ALL, ["device"]),
    ):
        assert changed.changes([before.training]) == {where: names}
        assert changed.of_training(["signs"]) != before.of_training(["signs"])
        assert changed.changes([changed.training, before.training]) == {}  # as it was earlier
    for scored in (made(data=(0, 1, 0)), made(confidence=0.6)):
        assert scored.training == before.training and scored.validation != before.validation
    tested, longer = made(data=(0, 0, 1)), made(training=plan.training.model_copy(update={"steps": 7}))
    assert tested == before._replace(test=tested.test) != before
    assert longer.untrained("signs") == before.untrained("signs") != tested.untrained("signs")
    for same in (
        *(made(domain={"threshold": 0.1}), made(packing="jointly"), made(order=("random",))),
        made(training=plan.training.model_copy(update={"rehearsal": 0.25})),
    ):
        assert same == before
    assert before.changes([]).keys() == {ALL, "signs"}


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


# -- how to resume -----------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "vlora.cli"]


def test_the_hint_counts_finished_trainings_and_knows_what_was_deleted(tmp_path: Path) -> None:
    hint = ResumeHint(tmp_path, restart=False)
    assert (str(hint), hint.option) == ("no training was finished", "--resume")
    finish(tmp_path, "a", "unfinished-1-b")  # the second was killed before it renamed the folder
    assert str(hint) == f"1 finished training kept in {tmp_path}/checkpoint"
    finish(tmp_path, "c")
    assert str(hint) == f"2 finished trainings kept in {tmp_path}/checkpoint"
    again = ResumeHint(tmp_path, restart=True)
    assert (str(again), again.option) == ("no training was deleted or run yet", "--restart")
    again.mark_cleared()
    assert again.option == "--resume"


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


def trained(out: Path) -> dict[Path, int]:
    found = (out / "checkpoint").glob("*/trained.json")
    return {file: file.stat().st_mtime_ns for file in found if not file.parent.name.startswith(UNFINISHED)}


def write_plan(folder: Path, names: Collection[str]) -> None:
    write_base(folder / "base")
    domains = ""
    for name in names:
        write_folders(folder / name)
        promise = "{relative_to: alone, minus: 0.99}"  # each domain is trained alone, in forks
        domains += f'  - {{name: {name}, source: {name}, question: "what is it ?", threshold: {promise}}}\n'
    (folder / "a plan.yaml").write_text(
        f"base: base\nconfidence: null\nlora: {{rank: 2}}\ntraining: {{steps: 50, batch_size: 4}}\ndomains:\n{domains}"
    )


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
    tmp_path: Path, number: signal.Signals, code: int, word: str, options: tuple[str, ...]
) -> None:
    write_plan(tmp_path, ("colors", "others", "more"))
    command, out = [*COMMAND, "fuse", "a plan.yaml", "--out", word, *options], tmp_path / word
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    until(lambda: bool(trained(out)) or run.poll() is not None, 120)
    run.send_signal(number)
    _, told = run.communicate(timeout=60)
    assert run.returncode == code, told
    finished = trained(out)
    count = "1 finished training" if len(finished) == 1 else f"{len(finished)} finished trainings"
    assert told.startswith(f"{word}: {count} kept in {word}/checkpoint; resume with: ") and told.count("\n") == 1, told
    again = told.partition("; resume with: ")[2].rstrip()
    assert again.endswith(" --resume") and "--restart" not in again
    done = subprocess.run(again, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert trained(out).items() > finished.items()  # three alone and all at once, none repeated
    assert len(trained(out)) == 4 and (out / "report.json").exists()
