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

from fusion.training.kept import UNFINISHED, Kept, same_command
from tests.fusion.small import write_base, write_folders

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "vlora.cli"]


def finish(out: Path, *names: str) -> None:
    for name in names:
        (out / "checkpoint" / name).mkdir(parents=True)
        (out / "checkpoint" / name / "trained.json").write_text("{}")


def test_what_is_kept_is_counted_when_it_is_asked_for(tmp_path: Path) -> None:
    kept = Kept(tmp_path, restart=False)
    assert (str(kept), kept.option) == ("no training was finished", "--resume")
    finish(tmp_path, "a")
    finish(tmp_path, "unfinished-1-b")  # killed after it wrote its files, before it renamed the folder
    assert str(kept) == f"1 finished training kept in {tmp_path}/checkpoint"
    finish(tmp_path, "c")
    assert str(kept) == f"2 finished trainings kept in {tmp_path}/checkpoint"


def test_a_run_that_was_to_delete_others_trainings_says_whether_it_did(tmp_path: Path) -> None:
    finish(tmp_path, "of an earlier run")
    kept = Kept(tmp_path, restart=True)
    assert (str(kept), kept.option) == ("nothing was deleted or trained yet", "--restart")
    kept.begun()
    assert kept.option == "--resume"


def test_the_command_is_the_same_but_for_one_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
        f"base: base\nlora: {{rank: 2}}\ntraining: {{steps: 50, batch_size: 4}}\ndomains:\n{domains}"
    )
    return folder


def trained(out: Path) -> dict[Path, int]:
    found = (out / "checkpoint").glob("*/trained.json")
    return {file: file.stat().st_mtime_ns for file in found if not file.parent.name.startswith(UNFINISHED)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "word", "options"),
    [
        (signal.SIGINT, 130, "interrupted", ("--restart",)),
        (signal.SIGTERM, 143, "terminated", ("--workers", "2")),
    ],
)
def test_a_run_that_is_stopped_goes_on_by_the_line_it_ends_with(
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
    assert trained(out).items() > finished.items()  # three alone and at least two more, none repeated
    assert len(trained(out)) == 5 and (out / "report.json").exists()
