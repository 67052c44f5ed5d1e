"""Behaviour common to all commands: sources of options, completion, progress, and exit."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import vlora.cli
from tests.cli.conftest import Vlora
from tests.processes import PATIENCE_S
from tests.server.running import Running, png
from tests.video_files import shades, write_video
from vlora.bench.report import Goal, Report
from vlora.cli.group import cli
from vlora.cli.options import long_flag
from vlora.cli.progress import counting, waiting

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "vlora.cli")


# -- sources of options -----------------------------------------------------------------------------------------------


def theta(monkeypatch: pytest.MonkeyPatch, *before: str, flags: tuple[str, ...] = ()) -> float:
    """The value that `serve` receives."""
    found: dict[str, float] = {}
    monkeypatch.setattr(cli.commands["serve"], "callback", lambda **settings: found.update(settings))
    assert cli.main([*before, "serve", *flags], prog_name="vlora", standalone_mode=False) is None
    return found["theta_s"]


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("in_environment", [False, True])
@pytest.mark.parametrize("as_flag", [False, True])
def test_flags_override_the_environment_which_overrides_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_file: bool, in_environment: bool, as_flag: bool
) -> None:
    config = tmp_path / "vlora.yaml"
    config.write_text("serve: {theta-s: 3}\n")
    if in_environment:
        monkeypatch.setenv("VLORA_SERVE_THETA_S", "2")
    value = theta(
        monkeypatch,
        *(("--config", str(config)) if in_file else ()),
        flags=("--theta-s", "1") if as_flag else (),
    )
    assert value == (1 if as_flag else 2 if in_environment else 3 if in_file else 0.1)


def test_the_environment_may_name_the_file_and_the_file_may_have_lists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "vlora.yaml"
    config.write_text(
        "serve:\n  weight: [signs=2, '*=1']\n  image-hosts: example.org\n  prefix-cache: false\n  theta-s: null\n"
    )
    monkeypatch.setenv("VLORA_CONFIG", str(config))
    found: dict[str, object] = {}
    monkeypatch.setattr(cli.commands["serve"], "callback", lambda **settings: found.update(settings))
    cli.main(["serve"], prog_name="vlora", standalone_mode=False)
    assert (found["weight"], found["image_hosts"], found["prefix_cache"], found["theta_s"]) == (
        ("signs=2", "*=1"),
        ("example.org",),
        False,
        0.1,
    )


def test_every_option_has_a_variable_named_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("VLORA_LOG_LEVEL", "VLORA_LOG_JSON"):  # set by a server started earlier in this process
        monkeypatch.delenv(variable, raising=False)
    for name, command in commands(cli):
        prefix = f"VLORA_{name}".upper().replace("-", "_").replace(" ", "_")
        # An earlier direct call, as in tests, must not fix the name.
        command.parse_args(click.Context(command, resilient_parsing=True), [])
        context = click.Context(command, auto_envvar_prefix=prefix, resilient_parsing=True)
        command.parse_args(context, [])
        for option in command.params:
            if isinstance(option, click.Option) and option.envvar != "VLORA_SERVER":
                monkeypatch.setenv(variable := f"{prefix}_{long_flag(option).upper().replace('-', '_')}", "mine")
                assert option.resolve_envvar_value(context) == "mine", variable


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("srve: {port: 1}", "unknown command 'srve'; did you mean 'serve'?"),
        ("serve: {rpyc_port: 1}", "serve: unknown option 'rpyc_port'; did you mean 'rpyc-port'?"),
        ("model: {eval: {quik: true}}", "model, eval: unknown option 'quik'; did you mean 'quick'?"),
        ("serve: [1]", "serve: write options and their values, such as 'http-port: 8000'"),
        ("just words", "contains no options; write"),
        ("serve: {", "is not YAML: line 1: a bracket that is not closed"),
        ("serve: {theta-s: many}", "invalid value for '--theta-s'"),
        ("serve: {theta-s: [1, 2]}", "serve: theta-s is [1, 2]; write one value"),
        ("serve: {weight: [{signs: 2}]}", "serve: weight is [{'signs': 2}]; write a value, or a list of them"),
        ("serve: {weight: [null]}", "serve: weight is [None]; write a value, or a list of them"),
    ],
)
def test_an_error_in_the_file_is_one_line(vlora_command: Vlora, tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "vlora.yaml"
    config.write_text(text)
    code, out, err = vlora_command("--config", str(config), "serve", "--adapter", "x")
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1, err


# -- completion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_completion_script(vlora_command: Vlora, tmp_path: Path, shell: str) -> None:
    if shell == "bash" and not shutil.which("bash"):
        pytest.skip("no bash here")
    code, out, err = vlora_command("completion", shell)
    assert (code, err) == (0, "") and "_VLORA_COMPLETE" in out
    if shutil.which(shell):
        (tmp_path / "script").write_text(out)
        assert subprocess.run([shell, "-n", str(tmp_path / "script")]).returncode == 0


@pytest.mark.parametrize(
    ("words", "offered"), [("vlora str", {"stream"}), ("vlora serve --policy algorithm1 --switching s", {"shadow"})]
)
def test_commands_options_and_choices_are_completed(words: str, offered: set[str]) -> None:
    place = str(len(words.split()) - 1)
    environment = os.environ | {"_VLORA_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": place}
    done = subprocess.run(COMMAND, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == offered


# -- progress ---------------------------------------------------------------------------------------------------------


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
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=theirs if stdout_too else out,
            stderr=theirs,
            cwd=ROOT,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
        )
        os.close(theirs)
        shown = read_all(ours)
        assert child.wait(20) == 0
    assert "pictures 3/3" in shown and "loading" in shown
    printed = shown if stdout_too else file.read_text()
    assert re.sub(r"\x1b\[[0-9;?]*\w", "", printed).count("line") == 3 and "last" in printed
    assert stdout_too or printed == "line\nline\nline\nlast\n"


def read_all(terminal: int) -> str:
    data = b""
    while select.select([terminal], [], [], 20)[0]:
        try:
            data += os.read(terminal, 4096)
        except OSError:
            break
    os.close(terminal)
    return data.decode(errors="replace")


def test_without_a_terminal_no_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with counting("pictures", 2) as advance, waiting("loading") as done:
        advance()
        done()
    assert capsys.readouterr() == ("", "")


# -- exit -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interrupt_finishes_the_work_in_progress(server: Running, address: str, tmp_path: Path) -> None:
    video = write_video(tmp_path / "long.mp4", shades(400))
    command = [*COMMAND, "stream", str(video), "--adapter", "cam", "--head", "night", "--server", address]
    child = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline().split()[:3] == ["0.0", "s", "bright"]
    child.send_signal(signal.SIGINT)
    printed = child.stdout.read().splitlines()
    assert child.wait(PATIENCE_S) == 130
    assert child.stderr.read() == "stopping: finishing the work in progress; interrupt again to exit immediately\n"
    lines = [json.loads(line) for line in (tmp_path / "out" / "long.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(len(printed) + 1)) and len(lines) < 200


def test_an_interrupt_ends_waiting_for_a_server(tmp_path: Path) -> None:
    video = write_video(tmp_path / "long.mp4", shades(1))
    command = [*COMMAND, "stream", str(video), "--adapter", "cam", "--head", "night", "--server", "127.0.0.1:1"]
    child = subprocess.Popen([*command, "--wait-s", "60"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None and "waiting for it" in child.stderr.readline()
    child.send_signal(signal.SIGINT)
    assert child.wait(10) == 130
    lines = child.stderr.read().splitlines()
    assert len(lines) == 2 and lines[1].startswith("error: cannot reach a server at 127.0.0.1:1")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="for systems with a disk that is always full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "completion", "bash"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "error: cannot write: No space left on device\n")


def test_help_lists_the_exit_codes(vlora_command: Vlora) -> None:
    _, out, _ = vlora_command("--help")
    assert all(word in out for word in ("Exit codes", "130", "143", "VLORA_SERVE_HTTP_PORT"))


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def test_every_command_that_reports_has_json() -> None:
    without = {name for name, command in commands(cli) if "as_json" not in {each.name for each in command.params}}
    servers = {"serve", "base serve", "cluster up", "cluster join"}
    assert without == servers | {"completion"}, "four run until they are stopped, the other prints a script"


def test_with_json_a_bench_prints_only_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("step", [{"what": "a", "ms": 1.5}], [Goal("ratio", 1.0, 1.2, True)])
    report.print()
    table, _, line = capsys.readouterr().out.rstrip().rpartition("\n")
    assert "vlora bench step" in table and "holds: ratio" in table
    report.print(only_json=True)
    assert capsys.readouterr().out.rstrip() == line and json.loads(line)["rows"] == [{"what": "a", "ms": 1.5}]


# -- batch and status -------------------------------------------------------------------------------------


def test_batch_answers_in_order_and_reports_bad_pictures(
    vlora_command: Vlora,
    address: str,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for place in range(4):
        (folder / f"{place}.png").write_bytes(png())
    args = ("batch", str(folder), "--question", "say:yes", "--server", address)
    code, out, err = vlora_command(*args)
    assert (code, err) == (0, "") and [line.split("  ")[1] for line in out.splitlines()] == ["yes"] * 4
    (folder / "2.png").write_bytes(b"no picture")
    code, out, err = vlora_command(*args, "--out", str(tmp_path / "answers.jsonl"))
    assert (code, out) == (1, "") and err.startswith(f"{folder / '2.png'}  image 1")
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["yes", "yes", "", "yes"]
    code, out, err = vlora_command("batch", str(folder), "--server", address)
    assert code == 2 and err == "error: give a question, or a head and the adapter it belongs to\n"


def test_a_batch_that_cannot_ask_leaves_the_former_answers(
    vlora_command: Vlora, address: str, image: str, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    out.write_text("former\n")
    bad = tmp_path / "0.png"
    bad.write_bytes(b"")
    to = ("--out", str(out), "--server")
    for arguments in (
        ("batch", image, *to, address),
        ("batch", image, "--question", "say:x", *to, "127.0.0.1:1"),
        ("batch", str(bad), image, "--question", "say:x", "--adapter", "zzz", *to, address),
    ):
        assert vlora_command(*arguments)[0] == 2 and out.read_text() == "former\n"
    assert vlora_command("batch", str(bad), image, "--question", "say:x", *to, address)[0] == 1
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == ["", "x"]
    assert vlora_command("batch", str(bad), "--question", "say:x", *to, address)[0] == 1
    assert "image 1" in json.loads(out.read_text())["problem"], "a run in which every picture fails has its file too"


def test_status_summarizes_a_server(vlora_command: Vlora, address: str) -> None:
    code, out, err = vlora_command("status", "--server", address)
    assert (code, err) == (0, "") and "0 running, 0 waiting" in out and out.count("\n") == 11
    assert "threads    1\n" in out and "sized by   arena_bytes\n" in out
    *_, table, kernels = out.splitlines()
    assert table == "ATMM table unknown"
    assert kernels == "kernels    plain torch (slower): no working C++ compiler found"
    code, out, _ = vlora_command("status", "--server", address, "--json")
    assert code == 0 and json.loads(out)["num_running"] == 0


def test_status_waits_for_the_given_time(vlora_command: Vlora, address: str) -> None:
    code, _, err = vlora_command("status", "--server", address, "--wait-s", "60")
    assert (code, err) == (0, "")
    code, out, err = vlora_command("status", "--server", "127.0.0.1:1", "--wait-s", "0.1")
    assert (code, out) == (2, "") and err.startswith("error: cannot reach a server at 127.0.0.1:1")


def test_an_invalid_value_is_reported_with_its_source(
    vlora_command: Vlora,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    bad = "error: invalid value for '--wait-s': 'soon' is not a valid float range"
    assert vlora_command("status", "--wait-s", "soon")[2] == f"{bad}; see 'vlora status --help'\n"
    config = tmp_path / "vlora.yaml"
    config.write_text("status:\n  wait-s: soon\n")
    error = vlora_command("--config", str(config), "status")[2]
    assert error == f"{bad} (from the config file); see 'vlora status --help'\n"
    monkeypatch.setenv("VLORA_STATUS_WAIT_S", "soon")
    error = vlora_command("--config", str(config), "status")[2]
    assert error == f"{bad} (from the environment, VLORA_STATUS_WAIT_S); see 'vlora status --help'\n"


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run([*COMMAND, "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "version" in done.stdout and vlora.cli.cli is cli


@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_an_interrupted_command_ends_at_once_with_one_line(number: str, code: int, word: str) -> None:
    """After one signal or two: the block here does not end by itself."""
    code_of = (
        "import sys, time\n"
        "from vlora.cli.interrupt import ends_with\n"
        "with ends_with(lambda: 'resume with: that'):\n"
        "    try: print('begun', flush=True); time.sleep(30)\n"
        "    finally:\n"
        "        if sys.argv[1] == '2': print('left', flush=True); time.sleep(30)\n"
    )
    for times in (1, 2):
        child = subprocess.Popen(
            [sys.executable, "-c", code_of, str(times)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None and child.stdout.readline() == "begun\n"
        child.send_signal(getattr(signal, number))
        if times == 2:
            assert child.stdout.readline() == "left\n"
            child.send_signal(getattr(signal, number))
        _, error = child.communicate(timeout=20)
        assert (child.returncode, error) == (code, f"{word}: resume with: that\n")


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
    done = subprocess.run([sys.executable, "-c", code_of], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr == error if stopped else error in done.stderr
