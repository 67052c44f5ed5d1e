"""Runs stages one after the other within a box of time, each in its own process, and prints a table of all of them.

A stage that has succeeded with the same source files on the same kind of device, according to its JSON, is not run
again. A stage that does not fit into the rest of the box is left for the next call, and shorter ones after it may run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from vlora.bench.gpu import record
from vlora.bench.gpu.plan import SMALL_NEEDS_S, STAGES, Stage
from vlora.errors import BadConfig

_RESERVE_S = 5.0
"""Of the box, to end the last stage's process and to print the table."""
_OUTPUT_LINES = 30

Process = Callable[[Stage, str, Path, float], tuple[int | None, str]]


class Outcome(NamedTuple):
    """The stages that ran, those that had succeeded before, and those that did not fit."""

    ran: Sequence[Stage]
    skipped: Sequence[Stage]
    left: Sequence[Stage]


class Checked(NamedTuple):
    """The records in a folder after a call."""

    records: dict[Stage, dict[str, Any] | None]  # by stage, in order; None for a stage that has not run
    outcome: Outcome  # of this call

    @property
    def succeeded(self) -> bool:
        """Whether every stage that has run succeeded, and meets its goals."""
        found = [each for each in self.records.values() if each is not None]
        return all(each.get("ok") is True and not record.unmet(each) for each in found)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the records by name, and the names of the stages that did not fit."""
        return {
            "stages": {stage.name: found for stage, found in self.records.items()},
            "left": [stage.name for stage in self.outcome.left],
        }


def check(out: Path, device: str, minutes: float, stages: Sequence[Stage], say: Callable[[str], None]) -> Checked:
    """Run stages within `minutes`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        outcome = run(out, device, minutes, stages, say, in_own_process)
    except OSError as error:
        raise BadConfig(f"cannot write the results in {out}: {error}; set another --out") from error
    if outcome.left:
        say(f"left for the next call: {', '.join(stage.name for stage in outcome.left)}")
    return Checked({stage: record.read(out / stage.file_name) for stage in STAGES}, outcome)


def run(
    out: Path, device: str, minutes: float, stages: Sequence[Stage], say: Callable[[str], None], process: Process
) -> Outcome:
    """Run the stages that have not succeeded with this code, within the time box."""
    ends_s = time.monotonic() + 60 * minutes - _RESERVE_S
    code = record.Code.here()
    ran: list[Stage] = []
    skipped: list[Stage] = []
    left: list[Stage] = []
    for stage in stages:
        path = out / stage.file_name
        if record.is_current(record.read(path), code, device):
            skipped.append(stage)
            continue
        remaining_s = ends_s - time.monotonic()
        if remaining_s < (stage.needs_s if device == "cuda" else SMALL_NEEDS_S):
            left.append(stage)
            continue
        limit_s = min(stage.limit_s, remaining_s)
        say(f"{stage.name}: at most {limit_s:.0f} s")
        path.unlink(missing_ok=True)
        started = time.monotonic()
        exit_code, output = process(stage, device, out, limit_s)
        _complete(path, stage, device, code, time.monotonic() - started, exit_code, output)
        ran.append(stage)
        say(f"{stage.name}: {_headline(record.read(path))}")
    return Outcome(ran, skipped, left)


def in_own_process(stage: Stage, device: str, out: Path, limit_s: float) -> tuple[int | None, str]:
    """Run a stage in a process."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(record.ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cpu":
        # The shapes are too small for several threads, which would wait for each other on a shared machine.
        environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "vlora.bench.gpu.process", stage.name, device, str(out), f"{limit_s:.1f}"]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # A session of its own, so that the processes that a stage starts end with it.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        exit_code: int | None = None
        try:
            exit_code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return exit_code, output.read()


def _complete(
    path: Path, stage: Stage, device: str, code: record.Code, seconds: float, exit_code: int | None, output: str
) -> None:
    """Add the cause and the output to the record of a stage that failed; write one if the process wrote none."""
    found = record.read(path) or {"stage": stage.name, "ok": False, "device": device, **code._asdict()}
    if exit_code == 0 and found["ok"]:
        return
    found["ok"] = False
    found["seconds"] = round(seconds, 2)
    found["output"] = output.splitlines()[-_OUTPUT_LINES:]
    if exit_code is None:
        found["error"] = {"message": f"ended at its limit of {seconds:.0f} s"}
    elif exit_code < 0:
        found["error"] = {"message": f"ended by signal {-exit_code} ({signal.Signals(-exit_code).name})"}
    elif "error" not in found:
        found["error"] = {"message": f"exit code {exit_code}"}
    record.write(path, found)


def _headline(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if not found["ok"]:
        error = found["error"]
        return f"FAILED: {error.get('type', '')} {error['message']}".replace("  ", " ").splitlines()[0][:200]
    return str((found.get("result") or {}).get("summary", ""))


def print_table(checked: Checked) -> None:
    """Print a row for each stage: of this call, of earlier ones, or not run."""
    records, outcome = checked
    table = Table(title="vlora gpu-check")
    for column in ("stage", "state", "s", "goals", "result"):
        table.add_column(column, justify="right" if column in ("s", "goals") else "left", overflow="fold")
    for stage, found in records.items():
        if found is None:
            state = "left" if stage in outcome.left else "not run"
            table.add_row(stage.name, state, "", "", f"about {stage.needs_s:.0f} s on an H100")
            continue
        state = "failed" if not found["ok"] else "ok" if stage in outcome.ran else "ok, earlier"
        goals = found.get("goals", ())
        met = f"{len(goals) - len(record.unmet(found))}/{len(goals)}" if goals else ""
        table.add_row(stage.name, state, f"{found['seconds']:.1f}", met, _headline(found))
        for name in record.unmet(found):
            table.add_row("", "", "", "", f"FALLS SHORT: {name}")
    Console(width=150).print(table)
