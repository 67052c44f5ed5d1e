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
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

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

ROOT = Path(__file__).parents[3]
_PACKAGES = ("vlora", "atmm", "heads", "benchmarks", "tests")
_SUFFIXES = {".py", ".cpp", ".cu", ".h"}


class Code(NamedTuple):
    commit: str | None  # the checkout's commit; None outside a git repository
    digest: str  # of the stage's source files, so that changes after the commit count, and checkouts without git

    @classmethod
    def of(cls, stage: Stage) -> Code:
        digest = hashlib.sha256()
        for path in sorted(_sources(stage)):
            digest.update(str(path.relative_to(ROOT)).encode())
            digest.update(path.read_bytes())
        return cls(commit(), digest.hexdigest()[:16])


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


def read(path: Path) -> dict[str, Any] | None:
    """A stage's record; None if there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _is_current(record: Mapping[str, Any] | None, code: Code, device: str) -> bool:
    """Whether the stage has succeeded with this code on this kind of device."""
    identity = (code.digest, device)
    return record is not None and record.get("ok") is True and (record.get("digest"), record.get("device")) == identity


def _unmet(record: Mapping[str, Any]) -> Sequence[str]:
    """The names of the goals that a record does not meet."""
    return [goal["name"] for goal in record.get("goals", ()) if not goal["holds"]]


# -- runs --------------------------------------------------------------------------------------------------------------

_RESERVE_S = 5.0
"""Of the box, to end the last stage's process and to print the table."""
_OUTPUT_LINES = 30  # of a traceback, and of what a failed stage printed

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
        return all(each.get("ok") is True and not _unmet(each) for each in found)

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
    return Checked({stage: read(out / stage.file_name) for stage in STAGES}, outcome)


def run(
    out: Path, device: str, minutes: float, stages: Sequence[Stage], say: Callable[[str], None], process: Process
) -> Outcome:
    """Run the stages that have not succeeded with this code, within the time box."""
    ends_s = time.monotonic() + 60 * minutes - _RESERVE_S
    ran: list[Stage] = []
    skipped: list[Stage] = []
    left: list[Stage] = []
    for stage in stages:
        path, code = out / stage.file_name, Code.of(stage)
        if _is_current(read(path), code, device):
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
        say(f"{stage.name}: {_headline(read(path))}")
    return Outcome(ran, skipped, left)


def in_own_process(stage: Stage, device: str, out: Path, limit_s: float) -> tuple[int | None, str]:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cpu":
        # The shapes are too small for several threads, which would wait for each other on a shared machine.
        environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "vlora.bench.gpu.runner", stage.name, device, str(out), f"{limit_s:.1f}"]
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


def run_stage(stage: Stage, device: str, folder: Path, seconds: float) -> int:
    """Run a stage in this process, for at most `seconds`, which the caller enforces. Returns the exit code."""
    started = time.monotonic()
    found: dict[str, Any] = {
        "bench": f"gpu-check {stage.name}",
        "stage": stage.name,
        "ok": False,
        "error": {"message": "the stage did not return"},
        "device": device,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **Code.of(stage)._asdict(),
    }

    def save() -> None:
        write(folder / stage.file_name, found | {"seconds": round(time.monotonic() - started, 2)})

    def keep(result: dict[str, Any]) -> None:
        found["goals"] = [goal.as_dict() for goal in result.get("goals", ())]
        found["result"] = {name: value for name, value in result.items() if name != "goals"}
        save()

    save()
    try:
        found["env"] = _prepare(device)
        save()
        keep(_result(stage, device, folder, started + seconds, keep))
    except Exception as error:
        lines = traceback.format_exc().splitlines()
        about = {"type": type(error).__name__, "message": str(error)[:2000]}
        found["error"] = about | {"traceback": lines[-_OUTPUT_LINES:]}
        save()
        print("\n".join(lines), file=sys.stderr)
        return 1
    found["ok"] = True
    del found["error"]
    save()
    return 0


def _prepare(device: str) -> dict[str, Any]:
    """Apply the settings under which results are comparable. Returns the environment."""
    import torch

    from vlora.bench.report import environment, version_of

    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    found = environment()
    found["versions"] |= {name: version_of(name) for name in ("triton", "numpy", "safetensors", "msgspec")}
    found["versions"]["cuda"] = torch.version.cuda
    return found


def _result(stage: Stage, device: str, folder: Path, ends_s: float, keep: Callable[[Any], None]) -> dict[str, Any]:
    import torch

    from vlora.bench.gpu.context import Context

    module = importlib.import_module(stage.module)
    result: dict[str, Any] = module.run(Context(torch.device(device), folder, ends_s, keep))
    return result


def _complete(
    path: Path, stage: Stage, device: str, code: Code, seconds: float, exit_code: int | None, output: str
) -> None:
    """Add the cause and the output to the record of a stage that failed; write one if the process wrote none."""
    found = read(path) or {"stage": stage.name, "ok": False, "device": device, **code._asdict()}
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
    write(path, found)


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
        met = f"{len(goals) - len(_unmet(found))}/{len(goals)}" if goals else ""
        table.add_row(stage.name, state, f"{found['seconds']:.1f}", met, _headline(found))
        for name in _unmet(found):
            table.add_row("", "", "", "", f"FALLS SHORT: {name}")
    Console(width=150).print(table)


if __name__ == "__main__":
    name, *where, limit_s = sys.argv[1:]
    sys.exit(run_stage(chosen([name])[0], where[0], Path(where[1]), float(limit_s)))
