"""Results in a folder belong to one run, and are never deleted without --restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion import commands
from fusion.commands import fuse
from fusion.report import results
from fusion.report.results import refuse_foreign, refuse_to_overwrite, replace_results
from vlora.errors import BadConfig
from vlora.plan_files.run_lock import lock_folder

PLAN = "domains:\n  - {name: a, source: /nowhere, question: q, threshold: 0.5}\n"


def write(folder: Path, content: str, adapter: str = "signs") -> None:
    for name in (f"adapters/{adapter}", "test/signs"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(content)
    (folder / "report.html").write_text(content)
    report = {"adapters": [{"name": adapter}], "domains": [{"name": "signs"}], "content": content}
    (folder / "report.json").write_text(json.dumps(report))


def found(out: Path) -> set[str]:
    files = {file for file in out.rglob("*") if file.is_file()}
    reports = {file for file in files if file.name == "report.json"}
    return {file.read_text() for file in files - reports} | {
        json.loads(file.read_text())["content"] for file in reports
    }


def finish(out: Path, number: int) -> None:
    """A training of a run that was stopped."""
    folder = out / "checkpoint" / f"{number:024x}"
    folder.mkdir(parents=True)
    (folder / "trained.json").write_text("{}")
    (out / "checkpoint" / "run.json").write_text("{}")


def test_results_replace_those_of_an_earlier_run(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with replace_results(tmp_path) as folder:
            write(folder, content)
            assert found(tmp_path) >= {content}
        assert found(tmp_path) == {content}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapters", "report.html", "report.json", "test"]


def test_results_that_cannot_be_written_replace_nothing(tmp_path: Path) -> None:
    write(tmp_path, "first")
    with pytest.raises(OSError, match="disk full"), replace_results(tmp_path) as folder:
        (folder / "adapters").mkdir()
        raise OSError("disk full")
    assert all((tmp_path / name).exists() for name in ("adapters/signs/file", "test/signs/file", "report.html"))
    with replace_results(tmp_path) as folder:
        write(folder, "second")
    assert found(tmp_path) == {"second"}


def test_an_interrupted_replacement_leaves_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed in the middle of replacing."""
    write(tmp_path, "first")
    removed: list[str] = []

    def interrupted(path: Path, remove: Callable[[Path], None] = results.remove) -> None:
        removed.append(path.name)
        if removed[-1] == "test":
            raise KeyboardInterrupt
        remove(path)

    monkeypatch.setattr(results, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt), replace_results(tmp_path) as folder:
        write(folder, "second")
    assert not (tmp_path / "report.json").exists()


def test_an_earlier_run_is_deleted_only_with_restart(tmp_path: Path) -> None:
    refuse_to_overwrite(tmp_path / "none")
    refuse_to_overwrite(tmp_path)
    for number, words in ((1, "1 finished training of"), (2, "2 finished trainings of")):
        finish(tmp_path, number)
        with pytest.raises(BadConfig, match=rf"{words} a run that was stopped; give --resume .* --restart"):
            refuse_to_overwrite(tmp_path)
    write(tmp_path, "first")
    with pytest.raises(BadConfig, match=r"results of a run that finished on 20.*--restart to train everything again"):
        refuse_to_overwrite(tmp_path)


def test_the_folder_is_checked_before_the_plans_data(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.yaml", tmp_path / "out"
    plan.write_text(PLAN)
    write(out, "first")
    with pytest.raises(BadConfig, match="results of a run that finished"):
        fuse(plan, out)
    with pytest.raises(BadConfig, match="only one of the two"):
        fuse(plan, out, resume=True, restart=True)
    assert found(out) >= {"first"}


def test_a_run_that_ended_while_the_plan_was_checked_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, out = tmp_path / "plan.yaml", tmp_path / "out"
    plan.write_text(PLAN)
    monkeypatch.setattr(commands, "check_plan", lambda *_: finish(out, 1))
    with pytest.raises(BadConfig, match="1 finished training of a run that was stopped"):
        fuse(plan, out)


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint/model.safetensors",
        "features/own.npy",
        "adapters/own/adapter_config.json",
        "test/red/0.png",
        "report.html",
        "report.json",
        "adapters",
    ],
)
@pytest.mark.parametrize("option", ["", "resume", "restart"])
def test_files_that_no_run_wrote_are_never_deleted(tmp_path: Path, name: str, option: str) -> None:
    plan, file = tmp_path / "plan.yaml", tmp_path / name
    plan.write_text(PLAN)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('["mine"]')
    words = rf"{tmp_path} contains {name.split('/')[0]}.*, which `vlora fuse` did not write"
    with pytest.raises(BadConfig, match=words):
        fuse(plan, tmp_path, resume=option == "resume", restart=option == "restart")
    assert file.read_text() == '["mine"]'


@pytest.mark.parametrize("name", ["adapters/own", "test/own", "checkpoint/own", "features/own"])
def test_files_beside_those_of_a_run_are_never_deleted(tmp_path: Path, name: str) -> None:
    write(tmp_path, "first")
    finish(tmp_path, 1)
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / f"{1:064x}.safetensors").touch()
    refuse_foreign(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(BadConfig, match=rf" contains {name.replace('/', '/ .')}\), which"):
        refuse_foreign(tmp_path)
    with pytest.raises(BadConfig, match="did not write"), replace_results(tmp_path):
        pass
    assert (tmp_path / name).exists() and (tmp_path / "adapters" / "signs" / "file").exists()


@pytest.mark.parametrize("stop_at", ["adapters", "test", "report.html"])
def test_an_interrupted_replacement_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: str
) -> None:
    """The adapters of both runs, which may be mixed, have different names."""
    write(tmp_path, "first", adapter="signs-digits")

    def interrupted(path: Path, remove: Callable[[Path], None] = results.remove) -> None:
        if path.name == stop_at:
            raise KeyboardInterrupt
        remove(path)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(results, "remove", interrupted)
        with replace_results(tmp_path) as folder:
            write(folder, "second")
    refuse_foreign(tmp_path)
    with replace_results(tmp_path) as folder:
        write(folder, "third")
    assert found(tmp_path) == {"third"}


_HOLD = """
import sys
from pathlib import Path
from vlora.plan_files.run_lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print(flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    message = rf"out is in use by process {os.getpid()} on .* since 20"
    with lock_folder(tmp_path / "out"):
        with pytest.raises(BadConfig, match=message), lock_folder(tmp_path / "out"):
            pass
        with lock_folder(tmp_path / "another"):
            pass
    with lock_folder(tmp_path / "out"):
        pass


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(BadConfig, match=rf"^{tmp_path}/file\S* cannot be created: .*; choose"), lock_folder(folder):
            pass


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(BadConfig, match=f"in use by process {other.pid} "), lock_folder(tmp_path):
            pass
        other.kill()
        other.wait()
        with lock_folder(tmp_path):
            pass
