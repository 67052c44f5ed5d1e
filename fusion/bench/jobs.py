"""Each measurement is a job in its own process, stored on disk when done, so a stopped benchmark can be resumed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from fusion.bench.domains import FAMILIES
from fusion.bench.measuring import (
    ALL,
    CONFIDENCE,
    DEFAULT,
    OPTIMUM,
    Bench,
    Meter,
    curve,
    extent,
    small_scores,
    table,
    thresholds_of,
)
from fusion.bench.result_store import ResultStore, origins
from fusion.bench.suite import suspected
from fusion.packing.guided import BUDGET, pack_guided
from fusion.packing.oracle import Oracle
from fusion.packing.orders import at_random
from fusion.training.parallel_jobs import end_with_parent
from vlora.plan_files.run_lock import lock_folder


def growth(seed: int, quick: bool, folder: Path) -> dict[str, Any]:
    """Pack parts of the suite's domains and all of them, by their number; each part contains the smaller ones."""
    made, sizes, steps = extent(quick)
    numbers = (2, 3) if quick else (3, 6, 9, len(made))
    bench = Bench(made, seed, sizes, steps, folder)
    thresholds = thresholds_of(small_scores(bench.splits))
    order = at_random(tuple(bench.domains), seed)
    rows = []
    for number in numbers:
        names = order[:number]
        own = {name: thresholds[name] for name in names}
        alone = Meter(bench.rehearsing)
        for name in names:
            alone((name,))
        meter = Meter(bench.rehearsing)
        packing = pack_guided(names, own, meter)
        oracle = Oracle(names, own, bench.rehearsing.together)
        bound = oracle.bound(suspected(made))
        optimum = oracle.optimum_of_few()
        rows.append(
            {
                "domains": list(names),
                "adapters": len(packing.adapters),
                "lower bound": bound.adapters,
                "optimum": None if optimum is None else len(optimum.adapters),
                "trainings": meter.trainings,
                "training s": meter.seconds,
                "alone s": alone.seconds,
            }
        )
    return {"seed": seed, "rows": rows}


_SEEDS = (0, 1, 2)
_THRESHOLDS = "(threshold)"


class JobGoal(NamedTuple):
    """A target: `value` must be at most `goal`, or at least if not `at_most`."""

    name: str
    value: float
    goal: float
    at_most: bool = True


class BenchResult(NamedTuple):
    """rows: the table, one row per seed and method. curves: test scores by the number of fused domains. growth: costs
    by the number of packed domains. origins: of all results.
    """

    rows: list[dict[str, Any]]
    goals: list[JobGoal]
    tables: list[dict[str, Any]]
    curves: list[dict[str, Any]]
    growth: list[dict[str, Any]]
    origins: list[dict[str, Any]]


class BenchJob(NamedTuple):
    """One measurement. kind: "table", "growth", or the name of the family of domains that a curve is of."""

    seed: int
    kind: str
    quick: bool

    @property
    def name(self) -> str:
        return f"{'quick-' if self.quick else ''}{self.kind}-{self.seed}"

    def measure(self, folder: Path) -> dict[str, Any]:
        match self.kind:
            case "table":
                return table(self.seed, self.quick, folder)
            case "growth":
                return growth(self.seed, self.quick, folder)
            case family:
                return curve(family, self.seed, self.quick, folder)


def run(
    quick: bool, folder: Path | None, say: Callable[[str], None], environment: Mapping[str, Any] | None = None
) -> BenchResult:
    """Run all jobs, one process per core.

    Args:
        quick: a single seed, few samples, few steps: a smoke test without meaningful scores.
        folder: for stored results, from which a run continues.
        say: receives lines about finished jobs.
        environment: of this run, as in `ResultStore`.

    Raises:
        RuntimeError: A job failed or was killed; its own output is on stderr.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return run(quick, Path(temporary), say, environment)
    with lock_folder(folder):
        return _run(quick, ResultStore(folder, environment or {}), say)


def _run(quick: bool, store: ResultStore, say: Callable[[str], None]) -> BenchResult:
    seeds = _SEEDS[:1] if quick else _SEEDS
    tables = [BenchJob(seed, "table", quick) for seed in seeds]
    grown = BenchJob(seeds[0], "growth", quick)
    curves = [BenchJob(seed, family, quick) for family in FAMILIES for seed in seeds]
    # Tables first, since they take longest.
    every = (*tables, grown, *curves)
    _run_jobs([job for job in every if not store.has(job.name)], store, say)
    found = {job.name: store.read(job.name) for job in every}
    rows, parts = [found[job.name] for job in tables], found[grown.name]["rows"]
    return BenchResult(
        list(_rows(rows)), _goals(rows, parts), rows, [found[job.name] for job in curves], parts, origins(found)
    )


def _run_jobs(jobs: Sequence[BenchJob], store: ResultStore, say: Callable[[str], None]) -> None:
    """Run jobs in a process each, as many at once as there are cores. An interrupt ends those that run."""
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(jobs))
    running: dict[int, tuple[BenchJob, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                job = waiting.pop()
                started = context.Process(target=run_job, args=(job, store, os.getpid()), daemon=True)
                started.start()
                running[started.sentinel] = job, started
            for sentinel in wait(list(running)):
                assert isinstance(sentinel, int)
                job, process = running.pop(sentinel)
                process.join()
                if process.exitcode:
                    raise RuntimeError(f"the job {job.name} ended with exit code {process.exitcode}")
                spent = store.read(job.name)["spent"]
                say(f"{job.name}: {spent['wall s']:.0f} s, {spent['cpu s']:.0f} s of processor time")
    finally:
        for _, left in running.values():
            left.kill()
            left.join()


def run_job(job: BenchJob, store: ResultStore, parent: int) -> None:
    """Run a job and store its result. parent: the process that this one ends with."""
    if not end_with_parent(parent):
        return
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    warnings.simplefilter("ignore")  # deprecation notes of third-party libraries
    logging.getLogger("vlora").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    started, cpu = time.perf_counter(), time.process_time()
    found = job.measure(store.folder / job.name)
    store.write(
        job.name, {**found, "spent": {"wall s": time.perf_counter() - started, "cpu s": time.process_time() - cpu}}
    )


def _rows(tables: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for found in tables:
        thresholds = found["thresholds"]
        plain = {"adapters": None, "trainings": None, "training s": None, "broken": None, "worst": None}
        yield {"seed": found["seed"], "method": _THRESHOLDS, **plain, **thresholds}
        for method, measured in found["methods"].items():
            room = {name: measured["test"][name] - threshold for name, threshold in thresholds.items()}
            kept = [left for name, left in room.items() if name not in found["missed alone"]]
            yield {
                "seed": found["seed"],
                "method": method,
                "adapters": measured["adapters"],
                "trainings": measured["trainings"],
                "training s": measured["training s"],
                "broken": sum(left < 0 for left in kept),
                "worst": min(kept, default=None),
                **{name: measured["test"][name] for name in thresholds},
            }


def _goals(tables: Sequence[dict[str, Any]], parts: Sequence[dict[str, Any]]) -> list[JobGoal]:
    """Domains that miss their thresholds even alone do not count. parts: of the suite, as `growth` packs them."""

    def broken(found: dict[str, Any], method: str) -> int:
        return sum(found["methods"][method]["test"][name] < found["thresholds"][name] for name in _counted(found))

    def fewest(found: dict[str, Any]) -> int:
        best = found["methods"].get(OPTIMUM)
        return int(found["lower bound"] if best is None else best["adapters"])

    own = [found["methods"][DEFAULT] for found in tables]
    number = sum(len(_counted(found)) for found in tables)
    of_all = [made["adapters"] - fewest(found) for made, found in zip(own, tables, strict=True)]
    of_parts = [part["adapters"] - (part["optimum"] or part["lower bound"]) for part in parts]
    costs = [made["trainings"] / len(found["thresholds"]) for made, found in zip(own, tables, strict=True)]
    costs += [part["trainings"] / len(part["domains"]) for part in parts]
    return [
        JobGoal("adapters more than the optimum or its lower bound, worst", max(*of_all, *of_parts), 1),
        JobGoal("trainings per domain, worst", max(costs), BUDGET),
        JobGoal(
            f"thresholds missed on test data, of {number} at {CONFIDENCE:g}",
            sum(broken(found, DEFAULT) for found in tables),
            (1 - CONFIDENCE) * number,
        ),
        JobGoal("thresholds that all in one misses, fewest of a seed", min(broken(f, ALL) for f in tables), 1, False),
    ]


def _counted(found: dict[str, Any]) -> list[str]:
    return [name for name in found["thresholds"] if name not in found["missed alone"]]
