"""Runs stages one after the other within a box of time, each in its own process, and prints a table of all of them.

    python -m vlora.bench.gpu.runner STAGE DEVICE FOLDER SECONDS    # one stage, in this process

A stage's JSON has the fields of a bench's report and more. A stage that has succeeded with the same source files on the
same kind of device, according to its JSON, is not run again. A stage that does not fit into the rest of the box is left
for the next call, and shorter ones after it may run.
"""

from __future__ import annotations

import ast
import datetime
import functools
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from vlora.bench.harness import ROOT, module_command
from vlora.bench.report import commit
from vlora.errors import BadConfig
from vlora.run_folder import write_whole


class Stage(NamedTuple):
    number: int  # place in the order, from 0
    name: str  # its name in `--stages`, and of its module in `vlora.bench.gpu.stages` or in `benchmarks.gpu`
    needs_s: float  # a stage starts only if the box has this much time left; an estimate for an H100
    limit_s: float  # the process is ended after this time

    @property
    def module(self) -> str:
        return f"{'vlora.bench.gpu.stages' if self.name in INSTALLED else 'benchmarks.gpu'}.{self.name}"

    @property
    def file_name(self) -> str:
        return f"{self.number:02d}-{self.name}.json"


STAGES: Sequence[Stage] = tuple(
    Stage(number, *fields)
    for number, fields in enumerate(
        (
            ("facts", 30, 90),
            ("smoke", 50, 120),
            ("oracle", 120, 240),
            ("attention", 40, 120),
            ("merge", 45, 120),
            ("step", 180, 330),
            ("serve", 120, 300),
            ("policies", 240, 420),
            ("heads", 40, 120),
            ("search", 150, 300),
            ("styles", 90, 240),
            ("prefill", 60, 180),
            ("costs", 120, 300),
            ("profile", 45, 120),
        )
    )
)
"""In order of value; docs/gpu.md says what each measures."""

INSTALLED = {"facts", "smoke", "oracle", "search", "costs"}
"""Stages in `vlora.bench.gpu.stages`; the others are in `benchmarks.gpu` of a checkout."""

SMALL_NEEDS_S = 5.0
"""Of every stage on a CPU, where all shapes are small."""


def chosen(names: Sequence[str]) -> list[Stage]:
    """The stages with these names in the order of value."""
    known = {stage.name: stage for stage in STAGES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BadConfig(f"no stage named {unknown[0]!r}; choose among {', '.join(known)}")
    return [stage for stage in STAGES if not names or stage.name in names]


# -- records -----------------------------------------------------------------------------------------------------------

_PACKAGES = ("vlora", "atmm", "heads", "benchmarks", "tests")
_SUFFIXES = {".py", ".cpp", ".cu", ".h"}


def code_of(stage: Stage) -> dict[str, str | None]:
    """The checkout's commit, None outside a git repository, and a digest of the stage's source files, so that changes
    after the commit count, and checkouts without git.
    """
    digest = hashlib.sha256()
    for path in sorted(_sources(stage)):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return {"commit": commit(), "digest": digest.hexdigest()[:16]}


def _sources(stage: Stage) -> set[Path]:
    """The stage's module and all modules that it imports, directly or not, at whatever place; compiled sources too. Of
    `oracle`, which runs tests, all files."""
    if stage.name == "oracle":
        return {path for package in _PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in _SUFFIXES}
    found: set[Path] = set()
    left = [stage.module]
    while left:
        name = left.pop()
        place = ROOT.joinpath(*name.split("."))
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file() and path not in found:
                found.add(path)
                left += _imports(path, ROOT)
    return found | {path for path in (ROOT / "atmm").rglob("*") if path.suffix in _SUFFIXES - {".py"}}


@functools.cache
def _imports(path: Path, root: Path) -> tuple[str, ...]:
    """The modules of these packages that a file names, and names in packages, which may be modules."""
    names = [".".join(path.relative_to(root).parts[:depth]) for depth in range(1, len(path.relative_to(root).parts))]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isascii():
            names.append(node.value.partition(":")[0])  # a module that is imported by name
    return tuple(name for name in names if name.split(".")[0] in _PACKAGES)


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Replace the file atomically: if this process is ended, the old record or the new one remains."""
    write_whole(path, json.dumps(record, indent=1, default=str).encode() + b"\n", durable=False)


def read(path: Path) -> dict[str, Any]:
    """A stage's record; empty if there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _unmet(record: Mapping[str, Any]) -> Sequence[str]:
    """The names of the goals that a record does not meet."""
    return [goal["name"] for goal in record.get("goals", ()) if not goal["holds"]]


# -- runs --------------------------------------------------------------------------------------------------------------

_RESERVE_S = 5.0
"""Of the box, to end the last stage's process and to print the table."""
_OUTPUT_LINES = 30  # of what a failed stage printed

Process = Callable[[Stage, str, Path, float], tuple[int | None, str]]
"""Runs a stage for at most so many seconds; returns its exit code (None: it was ended) and its output."""


class Checked(NamedTuple):
    """The records in a folder after a call, by stage, in order; empty for a stage that has not run."""

    records: dict[Stage, dict[str, Any]]
    ran: Sequence[Stage]  # by this call
    left: Sequence[Stage]  # for the next call: they did not fit

    @property
    def succeeded(self) -> bool:
        """Whether every stage that has run succeeded, and meets its goals."""
        return all(each.get("ok") is True and not _unmet(each) for each in self.records.values() if each)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the records by name, and the names of the stages that did not fit."""
        records = {stage.name: found or None for stage, found in self.records.items()}
        return {"stages": records, "left": [stage.name for stage in self.left]}


def in_own_process(stage: Stage, device: str, out: Path, limit_s: float) -> tuple[int | None, str]:
    arguments = (stage.name, device, str(out), f"{limit_s:.1f}")
    command, environment = module_command("vlora.bench.gpu.runner", *arguments)
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        # The shapes are too small for several threads, which would wait for each other on a shared machine.
        environment["OMP_NUM_THREADS"] = "1"
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


def check(
    out: Path,
    device: str,
    minutes: float,
    stages: Sequence[Stage],
    say: Callable[[str], None],
    process: Process = in_own_process,
) -> Checked:
    """Run the stages that have not succeeded with this code on this kind of device, within the time box."""
    ends_s = time.monotonic() + 60 * minutes - _RESERVE_S
    ran: list[Stage] = []
    left: list[Stage] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for stage in stages:
            path, before = out / stage.file_name, read(out / stage.file_name)
            identity = True, device, code_of(stage)["digest"]
            if (before.get("ok"), before.get("device"), before.get("digest")) == identity:
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
            if exit_code != 0 or not read(path).get("ok"):
                _add_cause(path, stage, device, time.monotonic() - started, exit_code, output.splitlines())
            ran.append(stage)
            say(f"{stage.name}: {_headline(read(path))}")
    except OSError as error:
        raise BadConfig(f"cannot write the results in {out}: {error}; set another --out") from error
    if left:
        say(f"left for the next call: {', '.join(stage.name for stage in left)}")
    return Checked({stage: read(out / stage.file_name) for stage in STAGES}, ran, left)


def _add_cause(
    path: Path, stage: Stage, device: str, seconds: float, exit_code: int | None, output: Sequence[str]
) -> None:
    """Add the cause and the output to the record of a stage that failed; write one if the process wrote none."""
    if exit_code is None:
        cause = f"ended at its limit of {seconds:.0f} s"
    elif exit_code < 0:
        cause = f"ended by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    else:
        cause = next((line for line in reversed(output) if line.strip()), f"exit code {exit_code}")[:2000]
    found = read(path) or {"stage": stage.name, "device": device, **code_of(stage)}
    failed = {"ok": False, "seconds": round(seconds, 2), "error": {"message": cause}}
    write(path, found | failed | {"output": output[-_OUTPUT_LINES:]})


def run_stage(stage: Stage, device: str, folder: Path, seconds: float) -> None:
    """Run a stage in this process, for at most `seconds`, which the caller enforces. The record has the results so far
    when it raises.
    """
    import torch

    from vlora.bench.gpu.context import Context
    from vlora.bench.report import environment, version_of

    started = time.monotonic()
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device")
    # Under these settings results are comparable.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    env = environment()
    env["versions"] |= {name: version_of(name) for name in ("triton", "numpy", "safetensors", "msgspec")}
    env["versions"]["cuda"] = torch.version.cuda
    about = {
        "bench": f"gpu-check {stage.name}",
        "stage": stage.name,
        "device": device,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **code_of(stage),
        "env": env,
    }

    def keep(result: dict[str, Any], ok: bool = False) -> None:
        found = {name: value for name, value in result.items() if name != "goals"}
        goals = [goal.as_dict() for goal in result.get("goals", ())]
        seconds = round(time.monotonic() - started, 2)
        write(folder / stage.file_name, {**about, "ok": ok, "seconds": seconds, "goals": goals, "result": found})

    module = importlib.import_module(stage.module)
    keep(module.run(Context(torch.device(device), folder, started + seconds, keep)), ok=True)


def _headline(found: Mapping[str, Any]) -> str:
    if not found["ok"]:
        error = found.get("error", {"message": "the stage did not return"})
        return f"FAILED: {error['message']}".splitlines()[0][:200]
    return str(found["result"].get("summary", ""))


def print_table(checked: Checked) -> None:
    """Print a row for each stage: of this call, of earlier ones, or not run."""
    table = Table(title="vlora gpu-check")
    for column in ("stage", "state", "s", "goals", "result"):
        table.add_column(column, justify="right" if column in ("s", "goals") else "left", overflow="fold")
    for stage, found in checked.records.items():
        if not found:
            state = "left" if stage in checked.left else "not run"
            table.add_row(stage.name, state, "", "", f"about {stage.needs_s:.0f} s on an H100")
            continue
        state = "failed" if not found["ok"] else "ok" if stage in checked.ran else "ok, earlier"
        goals, unmet = found.get("goals", ()), _unmet(found)
        met = f"{len(goals) - len(unmet)}/{len(goals)}" if goals else ""
        table.add_row(stage.name, state, f"{found['seconds']:.1f}", met, _headline(found))
        for name in unmet:
            table.add_row("", "", "", "", f"FALLS SHORT: {name}")
    Console(width=150).print(table)


if __name__ == "__main__":
    name, *where, limit_s = sys.argv[1:]
    run_stage(chosen([name])[0], where[0], Path(where[1]), float(limit_s))
