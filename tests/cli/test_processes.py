"""Commands as processes: a terminal, signals, a full disk, a served base model, and the demo."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
import torch
from rich.console import Console

import apps.demo
from tests.processes import PATIENCE_S
from tests.split.running import tiny
from tests.split.test_faults import base_process
from tests.video_files import shades, write_video
from vlora.split import connect
from vlora.split.frames import Direction

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "vlora.cli")
SCRIPTED = (sys.executable, "-m", "tests.cli.scripted_vlora")  # fusing and serving
NIGHT = ("--adapter", "cam", "--head", "night")


def child(*command: str, **options: object) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def test_the_module_runs_as_the_command(address: str, tmp_path: Path) -> None:
    out, _ = (process := child(*COMMAND, "--version")).communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and "version" in out
    (tmp_path / "broken.mp4").write_bytes(write_video(tmp_path / "whole.mp4", [20]).read_bytes()[:400])
    broken = str(tmp_path / "broken.mp4")
    out, err = (process := child(*COMMAND, "stream", broken, *NIGHT, "-s", address)).communicate(timeout=PATIENCE_S)
    message = f"error: cannot read video {broken!r}: it is not a video that this machine can decode\n"
    assert (process.returncode, out, err) == (2, "", message), "FFmpeg's own output is not shown"


@pytest.mark.parametrize("stdout_too", [pytest.param(False, marks=pytest.mark.slow), True])
def test_progress_is_shown_on_a_terminal_only_and_not_in_the_output(tmp_path: Path, stdout_too: bool) -> None:
    code = (
        "import time, click\n"
        "from vlora.cli.progress import counting, waiting\n"
        "with counting('pictures', 3) as advance:\n"
        "    for _ in range(3): click.echo('line'); advance(); time.sleep(0.15)\n"
        "with waiting('loading') as done: time.sleep(0.15); done(); click.echo('last')\n"
    )
    ours, theirs = pty.openpty()
    file = tmp_path / "out"
    with file.open("wb") as out:
        terminal = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
        to = theirs if stdout_too else out
        process = child(sys.executable, "-c", code, stdout=to, stderr=theirs, env=terminal)
        os.close(theirs)
        shown = read_all(ours)
        assert process.wait(PATIENCE_S) == 0
    assert "pictures 3/3" in shown and "loading" in shown
    printed = shown if stdout_too else file.read_text()
    assert re.sub(r"\x1b\[[0-9;?]*\w", "", printed).count("line") == 3 and "last" in printed
    assert stdout_too or printed == "line\nline\nline\nlast\n"


def read_all(terminal: int) -> str:
    data = b""
    while select.select([terminal], [], [], PATIENCE_S)[0]:
        try:
            data += os.read(terminal, 4096)
        except OSError:
            break
    os.close(terminal)
    return data.decode(errors="replace")


@pytest.mark.slow
def test_an_interrupt_finishes_the_work_in_progress(address: str, tmp_path: Path) -> None:
    video = write_video(tmp_path / "long.mp4", shades(400))
    process = child(*COMMAND, "stream", str(video), *NIGHT, "--server", address, "--out", str(tmp_path / "out"))
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().split()[:3] == ["0.0", "s", "bright"]
    process.send_signal(signal.SIGINT)
    printed = process.stdout.read().splitlines()
    assert process.wait(PATIENCE_S) == 130
    message = "stopping: finishing the work in progress; interrupt again to exit immediately\n"
    assert process.stderr.read() == message
    lines = [json.loads(line) for line in (tmp_path / "out" / "long.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(len(printed) + 1)) and len(lines) < 200


def test_an_interrupt_ends_waiting_for_a_server(tmp_path: Path) -> None:
    video = write_video(tmp_path / "long.mp4", shades(1))
    process = child(*COMMAND, "stream", str(video), *NIGHT, "--server", "127.0.0.1:1", "--wait-s", "3600")
    assert process.stderr is not None and "waiting for it" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    lines = process.stderr.read().splitlines()
    assert len(lines) == 2 and lines[1].startswith("error: cannot reach a server at 127.0.0.1:1")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="for systems with a disk that is always full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        _, err = (process := child(*COMMAND, "completion", "bash", stdout=full)).communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (1, "error: cannot write: No space left on device\n")


INTERRUPTED = """
import sys, time
from vlora.cli.interrupt import ends_with
with ends_with(lambda: 'resume with: that'):
    try: print('begun', flush=True); time.sleep(3600)
    finally:
        if sys.argv[1] == '2': print('left', flush=True); time.sleep(3600)
"""


@pytest.mark.parametrize("times", [1, 2])  # the block does not end by itself
@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_an_interrupted_command_ends_at_once_with_one_line(number: int, code: int, word: str, times: int) -> None:
    process = child(sys.executable, "-c", INTERRUPTED, str(times))
    for line in ("begun\n", "left\n")[:times]:
        assert process.stdout is not None and process.stdout.readline() == line
        process.send_signal(number)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, error) == (code, f"{word}: resume with: that\n")


@pytest.mark.parametrize(("stopped", "code", "error"), [(True, 130, "interrupted: that\n"), (False, 1, "ValueError")])
def test_an_error_that_an_interrupt_has_become_is_an_interrupt(stopped: bool, code: int, error: str) -> None:
    """A native library loses the interrupt that is raised in its call of Python, and reports an error of its own."""
    code_of = (
        "import os, signal\n"
        "from vlora.cli.interrupt import ends_with\n"
        "with ends_with(lambda: 'that'):\n"
        f"    try: {'os.kill(os.getpid(), signal.SIGINT)' if stopped else 'raise KeyError'}\n"
        "    except BaseException: raise ValueError('no shape') from None\n"
    )
    _, found = (process := child(sys.executable, "-c", code_of)).communicate(timeout=PATIENCE_S)
    assert process.returncode == code and (found == error if stopped else error in found)


@pytest.mark.slow
def test_a_base_model_is_served_until_it_is_terminated(tmp_path: Path) -> None:
    model = tiny("gpt2")
    model.save_pretrained(tmp_path / "text-model")
    address = f"unix:{tmp_path}/base.sock"
    with base_process(tmp_path / "text-model", address) as process:
        with connect(address) as base:
            base.wrap(tiny("gpt2"))
            x = torch.randn(3, 64)
            (y,) = base.calls.call(Direction.FORWARD, 0, 1, [x])
            torch.testing.assert_close(y, model.transformer.h[0].attn.c_attn(x))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 130
    assert not (tmp_path / "base.sock").exists()


@pytest.mark.slow
def test_the_demo_reports_what_was_served_and_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps.demo, "TURNS", 2)
    monkeypatch.setattr(apps.demo, "TURN_S", 0.1)
    console = Console(file=io.StringIO(), width=80)
    result = apps.demo.run(tmp_path, command=SCRIPTED, console=console)
    assert json.loads((tmp_path / "report.json").read_text()) == result
    night, day, words = result["domains"]
    assert (night["served"], night["num_served"]) == (1.0, 12)
    assert (day["served"], day["num_served"]) == (0.75, 12)
    assert (words["served"], words["num_served"], words["answered_by"]) == (0.5, 12, "words")
    assert (day["before"], day["after"], day["adapter"]) == (0.1, 0.9, "fused-1")
    assert (day["stream"]["seconds"], day["stream"]["right"]) == (3, 2)
    counts = {kind: values["count"] for kind, values in result["latencies"].items()}
    # Two questions per domain, to the base model and to the adapter.
    beside = counts.pop("words beside streams")
    assert counts == {"head": 24, "words": 12, "stream": 3, "words beside heads": 12} and beside > 0
    gained = result["gained"]
    assert result["served"] == {"merged": 0, "mixed": 0, "unmerged": 51 + beside + gained["requests"]["unmerged"]}
    assert gained["requests"]["unmerged"] > 0 < gained["unmerged_only_per_s"] and gained["answers_per_s"] > 0
    for values in result["latencies"].values():
        assert values["p50_s"] is None or 0 < values["p50_s"] <= values["p95_s"]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 for 3 domains, 0 rolled back" in shown and "0.750" in shown and max(map(len, shown.splitlines())) <= 80
    # The page has fusing and serving in one.
    page = (tmp_path / "report.html").read_text()
    assert page.count("<main>") == page.count("</main>") == 1
    assert 'href="fused/adapters/fused-1/"' in page and "0.750" in page and "http" not in page
    assert 'src="day.webm" poster="data:image/jpeg;base64,' in page and "3 seconds, 2 right" in page
    # The annotated video shows every frame, with the answer below the picture.
    capture = cv2.VideoCapture(str(tmp_path / "day.webm"))
    frames = []
    while (read := capture.read())[0]:
        frames.append(read[1])
    assert len(frames) == 30 and frames[5][:300].mean() < 60 < 200 < frames[25][:300].mean()
    assert frames[5][-48:].max() > 200


@pytest.mark.slow
def test_the_demo_ends_with_the_exit_code_of_a_failed_fuse(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^7$"):
        apps.demo.run(tmp_path, plan="broken", command=SCRIPTED, console=Console(file=io.StringIO()))
