"""An interrupted run prints one line with its finished trainings and the command to resume, and the command works."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusion.training.resume_hint import UNFINISHED, ResumeHint, same_command
from tests.fusion.small import write_base, write_folders

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
    end = time.monotonic() + 120
    while not trained(out) and run.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
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
