"""Each measurement is a job in its own process, stored on disk when done, so a stopped benchmark can be resumed."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from fusion.bench.domains import FAMILIES
from fusion.bench.measuring import ALL, CONFIDENCE, DEFAULT, OPTIMUM, curve, table
from fusion.packing.guided import BUDGET
from vlora.plan_files.run_lock import lock_folder

_SEEDS = (0, 1, 2)
_THRESHOLDS = "(threshold)"


class JobGoal(NamedTuple):
    """A target: `value` must be at most `goal`, or at least if not `at_most`."""

    name: str
    value: float
    goal: float
    at_most: bool = True


class BenchResult(NamedTuple):
    """rows: the table, one row per seed and method. curves: test scores by the number of fused domains."""

    rows: list[dict[str, Any]]
    goals: list[JobGoal]
    tables: list[dict[str, Any]]
    curves: list[dict[str, Any]]


class BenchJob(NamedTuple):
    """One measurement. family: empty for the table."""

    seed: int
    family: str
    quick: bool
    folder: Path

    @property
    def result(self) -> Path:
        return self.folder / f"{'quick-' if self.quick else ''}{self.family or 'table'}-{self.seed}.json"


def run(quick: bool, folder: Path | None, say: Callable[[str], None]) -> BenchResult:
    """Run all jobs, one process per core.

    Args:
        quick: a single seed, few samples, few steps: a smoke test without meaningful scores.
        folder: for stored results, from which a run continues.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return run(quick, Path(temporary), say)
    with lock_folder(folder):
        return _run(quick, folder, say)


def _run(quick: bool, folder: Path, say: Callable[[str], None]) -> BenchResult:
    seeds = _SEEDS[:1] if quick else _SEEDS
    tables = [BenchJob(seed, "", quick, folder) for seed in seeds]
    curves = [BenchJob(seed, family, quick, folder) for family in FAMILIES for seed in seeds]
    # Tables first, since they take longest.
    missing = [job for job in (*tables, *curves) if not job.result.exists()]
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(min(cores, max(1, len(missing))), multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run_job, job) for job in missing]):
            say(future.result())
    found = [[json.loads(job.result.read_text()) for job in jobs] for jobs in (tables, curves)]
    rows = list(_rows(found[0]))
    return BenchResult(rows, _goals(found[0]), *found)


def run_job(job: BenchJob) -> str:
    """Run a job; return a line with its duration."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    warnings.simplefilter("ignore")  # deprecation notes of third-party libraries
    logging.getLogger("vlora").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    started, cpu = time.perf_counter(), time.process_time()
    work = job.result.with_suffix("")
    found = curve(job.family, job.seed, job.quick, work) if job.family else table(job.seed, job.quick, work)
    spent = {"wall s": time.perf_counter() - started, "cpu s": time.process_time() - cpu}
    temporary = job.result.with_suffix(".unfinished")
    temporary.write_text(json.dumps({**found, "spent": spent}) + "\n")
    temporary.replace(job.result)
    return (
        f"{job.family or 'table'}, seed {job.seed}: {spent['wall s']:.0f} s, {spent['cpu s']:.0f} s of processor time"
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


def _goals(tables: Sequence[dict[str, Any]]) -> list[JobGoal]:
    """Domains that miss their thresholds even alone are no promises."""

    def broken(found: dict[str, Any], method: str) -> int:
        return sum(found["methods"][method]["test"][name] < found["thresholds"][name] for name in _promised(found))

    def fewest(found: dict[str, Any]) -> int:
        best = found["methods"].get(OPTIMUM)
        return int(found["lower bound"] if best is None else best["adapters"])

    own = [found["methods"][DEFAULT] for found in tables]
    number = sum(len(_promised(found)) for found in tables)
    more = max(made["adapters"] - fewest(found) for made, found in zip(own, tables, strict=True))
    cost = max(made["trainings"] / len(found["thresholds"]) for made, found in zip(own, tables, strict=True))
    return [
        JobGoal("adapters more than the optimum or its lower bound, worst seed", more, 1),
        JobGoal("trainings per domain, worst seed", cost, BUDGET),
        JobGoal(
            f"promises broken on test data, of {number} at {CONFIDENCE:g}",
            sum(broken(found, DEFAULT) for found in tables),
            (1 - CONFIDENCE) * number,
        ),
        JobGoal("promises that all in one breaks, fewest of a seed", min(broken(f, ALL) for f in tables), 1, False),
    ]


def _promised(found: dict[str, Any]) -> list[str]:
    return [name for name in found["thresholds"] if name not in found["missed alone"]]
