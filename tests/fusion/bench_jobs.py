"""Jobs of `vlora bench fusion` that replace trainings; run as a program, jobs that run until they are ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from fusion.bench import jobs
from fusion.bench.jobs import BenchJob
from fusion.bench.result_store import ResultStore
from fusion.training.parallel_jobs import end_with_parent


def a_curve(family: str, seed: int) -> dict[str, Any]:
    return {"family": family, "seed": seed, "alone": {"a": 0.8, "b": 0.6}, "fused": [{"a": 0.8}, {"a": 0.4, "b": 0.6}]}


def quick_job(job: BenchJob, store: ResultStore, parent: int) -> None:
    assert os.getpid() != parent
    store.write(job.name, {**a_curve(job.kind, job.seed), "spent": {"wall s": 2.0, "cpu s": 1.0}})


def failing_job(job: BenchJob, store: ResultStore, parent: int) -> None:
    if job.seed == 1:
        sys.exit(3)
    endless_job(job, store, parent)


def endless_job(job: BenchJob, store: ResultStore, parent: int) -> None:
    if not end_with_parent(parent):  # as a job that starts after the parent's end
        return
    unfinished = store.folder / job.name
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(unfinished.with_suffix(".pid"))
    time.sleep(600)


if __name__ == "__main__":
    from tests.fusion import bench_jobs

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    jobs.run_job = bench_jobs.endless_job
    jobs.run(True, Path(sys.argv[1]), print)
