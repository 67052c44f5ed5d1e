"""The harness of every benchmark: its cases, their stored results, processes, report and plots.

A benchmark is a value, `BENCH` of its module. `run` measures its cases one after the other, or each in a process of its
own, stores each result as soon as it is there, checks the goals, prints the report and draws the plots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import importlib.util
import json
import logging
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from vlora.bench.report import Goal, Report, Row, commit, environment, page
from vlora.errors import BadConfig
from vlora.run_folder import append, lock_folder, write_whole

BENCHES = {
    "step": "vlora.bench.step",
    "costs": "vlora.bench.costs",
    "serve": "vlora.bench.serve",
    "tp": "vlora.bench.tp",
}
"""Modules of the installed benchmarks. A checkout has those of `benchmarks.BENCHES` too."""

ROOT = Path(__file__).parents[2]
ORIGIN = ("commit", "machine", "gpu", "versions")


class Measured(NamedTuple):
    """rows: of the table, all with the same keys. found: further values of the JSON, by name. goals: of these rows."""

    rows: Sequence[Row]
    found: Mapping[str, Any] = {}
    goals: Sequence[Goal] = ()


Measure = Callable[..., Measured]
Results = Mapping[str, Measured]
"""By case."""


def joined(results: Results) -> Measured:
    """All rows and goals in order, and all further values; of equal names the first value."""
    found: dict[str, Any] = {}
    for each in results.values():
        found = {**each.found, **found}
    rows = [row for each in results.values() for row in each.rows]
    return Measured(rows, found, [goal for each in results.values() for goal in each.goals])


def own_goals(measured: Measured) -> Sequence[Goal]:
    return measured.goals


def whole(quick: bool) -> dict[str, Any]:
    """One case, for measurements that share what is costly to make."""
    return {"all": quick}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A benchmark.

    Attributes:
        name: On the command line, and of the files of a report.
        cases: Called with `quick` and the settings of the command line: what to measure, by name.
        measure: Measures one case. With `parts` it gets the store as a second argument, for parts of its results and
            for files in the store's folder.
        goals: The goals of all measurements; by default those that come with them.
        combine: Makes one table of the cases' results.
        pictures: `benchmarks.plots.Picture`s of the combined rows, by name of the file.
        options: The settings that `cases` takes beside `quick`.
        same: In which of these a stored result must agree to be used: by default in all, so only a run that continues
            an interrupted one uses it; fewer for results that take hours.
        jobs: Cases run in processes of their own with one thread each, as many at once as there are cores.
        alone: Cases that run after the others in this process, with `jobs`.
        in_all: Whether it is part of `vlora bench all`.
        paint: Draws all stored results into a folder, in place of the pictures.
    """

    name: str
    measure: Measure
    cases: Callable[..., Mapping[str, Any]] = whole
    goals: Callable[[Measured], Sequence[Goal]] = own_goals
    combine: Callable[[Results], Measured] = joined
    pictures: Callable[[Sequence[Row]], Mapping[str, Any]] | None = None
    options: frozenset[str] = frozenset()
    parts: bool = False
    same: Sequence[str] = ORIGIN
    jobs: bool = False
    alone: Callable[[Any], bool] = lambda case: False
    in_all: bool = True
    paint: Callable[[Store, Path], None] | None = None


def modules() -> dict[str, str]:
    """Where each benchmark of this installation is, MODULE or MODULE:VALUE, in the order of `vlora bench all`."""
    if not (ROOT / "benchmarks").is_dir():
        return BENCHES
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return BENCHES | importlib.import_module("benchmarks").BENCHES


def bench_named(name: str) -> Bench:
    """Import a benchmark.

    Raises:
        BadConfig: There is none with this name; the message lists the names.
    """
    known = modules()
    if name not in known:
        hint = "" if len(known) > len(BENCHES) else "; a checkout of the repository has more"
        raise BadConfig(f"no bench named {name!r}; choose one of {', '.join(known)} or all{hint}")
    module, _, value = known[name].partition(":")
    bench: Bench = getattr(importlib.import_module(module), value or "BENCH")
    return bench


def module_command(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a process that runs a module of this checkout."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return [sys.executable, "-m", module, *arguments], os.environ | {"PYTHONPATH": path}


class Store:
    """Results by name, a JSON file each, with the commit and the machine of their measurement.

    Args:
        folder: Made when the first result is stored.
        env: Of results that are measured now: `report.environment()`, or empty.
        same: In which of these a result must agree to count.
    """

    def __init__(self, folder: Path, env: Mapping[str, Any], same: Sequence[str] = ()) -> None:
        self.folder = folder
        self._same = same
        self._origin = {name: env.get(name) for name in ORIGIN}

    def read(self, name: str) -> dict[str, Any] | None:
        """A stored result with its `origin`; None if there is none."""
        try:
            found = {"origin": dict.fromkeys(ORIGIN), **json.loads(self._file(name).read_text())}
        except (OSError, ValueError, TypeError):
            return None
        return found if all(found["origin"][each] == self._origin[each] for each in self._same) else None

    def write(self, name: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Store a result. Returns it as `read` does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**result, "origin": self._origin}, default=str) + "\n"
        write_whole(self._file(name), text.encode(), durable=False)
        found = self.read(name)
        assert found is not None
        return found

    def value(self, name: str, make: Callable[[], Any]) -> Any:
        """A stored value, made first if there is none, by one of the processes that need it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._file(name).with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return (self.read(name) or self.write(name, {"value": make()}))["value"]

    def _file(self, name: str) -> Path:
        return self.folder / (re.sub(r"[^-\w.,= ]+", "-", name) + ".json")


def origins(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The commits and machines of stored results, with the names of each one's results."""
    found: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        origin = {key: result["origin"][key] for key in ORIGIN}
        found.setdefault(json.dumps(origin), {**origin, "results": []})["results"].append(name)
    return list(found.values())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(name: str, quick: bool = False, out: Path | None = None, *, only_json: bool = False, **settings: Any) -> bool:
    """Run one benchmark, or "all", and print each report.

    Args:
        name: Of a benchmark, or "all".
        quick: Fewer and smaller cases.
        out: A folder for `NAME.json`, the page of all reports in it, and `NAME/*.png`. The results of cases are in
            `NAME/work` or `NAME/quick`; a run that was interrupted continues from them, and one of all benchmarks after
            those with a report of this commit. `journal.jsonl` has a line for each case: its time, and the load.
        only_json: Print no tables.
        settings: Of this benchmark.

    Returns:
        Whether every goal is met.
    """
    every = [bench_named(each) for each in (modules() if name == "all" else (name,))]
    every = [bench for bench in every if bench.in_all or name != "all"]
    draws = out is not None and any(bench.pictures or bench.paint for bench in every)
    if draws and importlib.util.find_spec("matplotlib") is None:
        raise BadConfig("--out needs matplotlib for its pictures; pip install 'vlora[bench]'")
    holds = True
    for each in every:
        found = _finished(each.name, quick, out) if name == "all" and out is not None else None
        if found is not None:
            say(f"{each.name}: measured at this commit")
            holds &= found
            continue
        holds &= finish(each, measured(each, quick, out, **settings), out, only_json)
        gc.collect()
    return holds


def _finished(name: str, quick: bool, out: Path) -> bool | None:
    """Whether the goals of a report of this commit and machine hold; None if there is no such report."""
    try:
        report = json.loads((out / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    env = environment()
    if report.get("quick") is not quick or any(report["env"].get(key) != env[key] for key in ORIGIN):
        return None
    return all(goal["holds"] for goal in report["goals"])


def measured(bench: Bench, quick: bool, out: Path | None = None, **settings: Any) -> Report:
    """Measure all cases, or read their stored results.

    Raises:
        BadConfig: The benchmark draws its results into a folder, and there is none.
    """
    if bench.paint is not None and out is None:
        raise BadConfig(f"vlora bench {bench.name} draws into a folder; give --out DIR")
    lasting = bench.same != ORIGIN
    with tempfile.TemporaryDirectory() as temporary:
        folder = (Path(temporary) if out is None else out) / bench.name / ("quick" if quick else "work")
        with lock_folder(folder):
            store = Store(folder, environment(), bench.same)
            report = _report(bench, store, quick, settings)
            if bench.paint is not None:
                bench.paint(store, folder.parent)
        if not lasting:
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):  # it has pictures
                folder.parent.rmdir()
    return report


def _report(bench: Bench, store: Store, quick: bool, settings: Mapping[str, Any]) -> Report:
    cases = dict(bench.cases(quick, **settings))
    stored = {name: store.read(name) for name in cases}
    missing = {name: case for name, case in cases.items() if stored[name] is None}
    jobs = {name: case for name, case in missing.items() if bench.jobs and not bench.alone(case)}
    _run_jobs(bench, jobs, store)
    stored |= {name: store.read(name) for name in jobs}
    for name, case in [(name, case) for name, case in missing.items() if name not in jobs]:
        stored[name] = store.write(name, _timed(bench.measure, bench.parts, case, store))
        if len(cases) > 1:
            say(f"{bench.name}, {name}: {stored[name]['spent']['wall s']:.0f} s")  # type: ignore[index]
    results = {name: each for name, each in stored.items() if each is not None}
    combined = bench.combine({name: _measured(each) for name, each in results.items()})
    spent = {name: each["spent"] for name, each in results.items()}
    found = {**combined.found, "quick": quick, "spent": spent}
    found |= {"origins": origins(results)} if bench.same != ORIGIN else {}
    name, title = found.pop("name", bench.name), found.pop("title", None)
    return Report(name, combined.rows, bench.goals(combined), title, found)


def _measured(stored: Mapping[str, Any]) -> Measured:
    return Measured(stored["rows"], stored["found"], [Goal(*goal) for goal in stored["goals"]])


def _timed(measure: Measure, parts: bool, case: Any, store: Store) -> dict[str, Any]:
    started, cpu, load = time.perf_counter(), time.process_time(), os.getloadavg()[0]
    result = measure(case, store) if parts else measure(case)
    spent = {"wall s": time.perf_counter() - started, "cpu s": time.process_time() - cpu}
    return {**result._asdict(), "spent": {**spent, "load": round(max(load, os.getloadavg()[0]), 1)}}


def _run_jobs(bench: Bench, cases: Mapping[str, Any], store: Store) -> None:
    """Raises RuntimeError: a job failed or was killed; its own output is on stderr. An interrupt ends all of them."""
    context = multiprocessing.get_context("spawn")
    waiting = list(cases.items())[::-1]
    running: dict[int, tuple[str, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                name, case = waiting.pop()
                args = (bench.measure, bench.parts, name, case, store, os.getpid())
                process = context.Process(target=run_job, args=args, daemon=True)
                process.start()
                running[process.sentinel] = name, process
            for sentinel in wait(list(running)):
                assert isinstance(sentinel, int)
                name, ended = running.pop(sentinel)
                ended.join()
                if ended.exitcode:
                    raise RuntimeError(f"the job {name} ended with exit code {ended.exitcode}")
                spent = (store.read(name) or {})["spent"]
                say(f"{name}: {spent['wall s']:.0f} s, {spent['cpu s']:.0f} s of processor time")
    finally:
        for _, left in running.values():
            left.kill()
            left.join()


def run_job(measure: Measure, parts: bool, name: str, case: Any, store: Store, parent: int) -> None:
    """Measure a case with one thread, and store the result. parent: the process that this one ends with."""
    from fusion.training.parallel_jobs import end_with_parent

    if not end_with_parent(parent):
        return
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    warnings.simplefilter("ignore")  # deprecation notes of third-party libraries
    logging.getLogger("vlora").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    store.write(name, _timed(measure, parts, case, store))


def finish(bench: Bench, report: Report, out: Path | None, only_json: bool = False) -> bool:
    """Print a report and, with `out`, write its files. Returns whether its goals are met."""
    report.print(only_json=only_json)
    if out is not None:
        text = json.dumps(report.as_dict(), default=str) + "\n"
        write_whole(out / f"{report.bench}.json", text.encode(), durable=False)
        for case, spent in report.found.get("spent", {}).items():
            line = {"bench": report.bench, "case": case, "commit": commit(), "quick": report.found["quick"], **spent}
            append(out / "journal.jsonl", json.dumps(line).encode() + b"\n", durable=False)
        write_whole(out / "README.md", page(out).encode(), durable=False)
        for file, picture in bench.pictures(report.rows).items() if bench.pictures else ():
            picture.save(out / report.bench / f"{file}.png")
    return all(goal.holds for goal in report.goals)
