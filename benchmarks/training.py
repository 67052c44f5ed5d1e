"""`vlora bench training`: requests beside a training in one engine, with the latency promise, and without one.

Times are processor seconds of the engine's thread, to which the gaps are added in which it has nothing to do, so that
other load on the machine hardly counts: an idle engine without training skips to the next arrival. The ways run by
turns with the same arrivals.

A training in a process of its own competes for the processor, so it is compared in wall time, with the engine and that
process on one core: run this part on an otherwise idle machine.

Its batches are of 2 x 64 tokens; in reports before 2026-11-29 they were ragged ones of 4 x 16 to 64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import Qwen2VLForConditionalGeneration

from benchmarks.arrivals import Clock, ThreadClock, WallClock, poisson, steps
from benchmarks.split.processes import Process, run_together, running, training
from benchmarks.split.rows import TRAIN, write_checkpoint
from fusion.embedded import checkpoint_path
from vlora.bench.dummy import ranks_config
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.timing import percentile, threads
from vlora.config import EngineConfig
from vlora.engine import Engine
from vlora.models.processing import InputProcessor
from vlora.types import Request, SamplingParams

SLOWDOWN = 1.15
WAYS = {"alone": None, "beside": SLOWDOWN, "beside, no promise": math.inf}
"""The promise of each way; None: no training."""

PROMPT, ANSWER = 32, 16  # tokens of a request
_POLL_S = 1e-3


class Size(NamedTuple):
    """Extent of a run. requests: of each way, load and round. loads: shares of the capacity."""

    layers: int
    requests: int
    rounds: int
    loads: tuple[float, ...] = (0.3, 0.6, 0.9)


FULL = Size(layers=4, requests=200, rounds=2)
QUICK = Size(layers=2, requests=150, rounds=1)


@dataclasses.dataclass
class Served:
    """What one way measured. latencies_s: of its requests. seconds: of its runs. num_tokens: trained meanwhile."""

    latencies_s: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    num_tokens: int = 0


def measure(quick: bool) -> Measured:
    """Serve each load in all ways."""
    size = QUICK if quick else FULL
    with threads(1):
        rows = in_one_engine(size)
        with one_core():
            rows += in_processes(size)
    return Measured(rows)


def in_one_engine(size: Size) -> list[dict[str, Any]]:
    """The rows in processor seconds."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        clock = ThreadClock()
        engine = start(Path(folder), size.layers, clock)
        capacity = measure_capacity(engine, clock)
        for load in size.loads:
            found = {way: Served() for way in WAYS}
            for number in range(size.rounds):
                gaps = poisson(load * capacity, size.requests, seed=number)
                for way, slowdown in WAYS.items():
                    serve(engine, clock, gaps, slowdown, found[way])
            rows += rows_of("processor", load, load * capacity, found)
        engine.close()
    return rows


def in_processes(size: Size) -> list[dict[str, Any]]:
    """The rows in wall time: no training, one in the engine with the promise, and one in a process of each class."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, clock = Path(name), WallClock()
        engine = start(folder, size.layers, clock)
        with trainer_processes(folder, size.layers) as processes:
            capacity = measure_capacity(engine, clock)
            for load in size.loads:
                found = {way: Served() for way in ("alone", "beside", *processes)}
                for number in range(size.rounds):
                    gaps = poisson(load * capacity, size.requests, seed=number)
                    serve(engine, clock, gaps, None, found["alone"])
                    serve(engine, clock, gaps, SLOWDOWN, found["beside"])
                    for kind, process in processes.items():
                        with training(process, folder / "stop") as answer:
                            serve(engine, clock, gaps, None, found[kind])
                        found[kind].num_tokens += round(answer["in time"])
                rows += rows_of("wall", load, load * capacity, found)
        engine.close()
    return rows


@contextlib.contextmanager
def trainer_processes(folder: Path, num_layers: int) -> Iterator[dict[str, Process]]:
    """Plain PEFT on other copies of the model: with the engine's priority, with niceness 19, and in SCHED_IDLE.

    They run on the cores of the thread that starts them. The first step warms up.
    """
    checkpoint = str(write_checkpoint(folder, num_layers))
    flags: dict[str, Sequence[str]] = {"process": (), "nice process": ("--nice", "19"), "idle process": ()}
    with running(*(Process("worker", checkpoint, *own) for own in flags.values())) as workers:
        processes = dict(zip(flags, workers, strict=True))
        run_together(workers, [TRAIN] * len(workers))
        # Threads that exist by now keep their own priority; with one thread there is none that computes.
        os.sched_setscheduler(processes["idle process"].pid, os.SCHED_IDLE, os.sched_param(0))
        yield processes


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Run this thread, and processes that it starts, on one core until the end of the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def start(folder: Path, num_layers: int, clock: Clock) -> Engine:
    """An engine with random weights and one training that does not end."""
    words = random.Random(0)
    records = [
        {"question": " ".join(words.choices(("what", "is", "shown", "where", "red", "blue"), k=8)), "answer": "red box"}
        for _ in range(64)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    plan = {"name": "trained", "data": "data.jsonl", "steps": 10**6, "held_out": 0}
    (folder / "plan.yaml").write_text(yaml.safe_dump({"folder": "out", "trainings": [plan]}))
    config = EngineConfig(model="dummy", dtype="float32", threads=1, arena_bytes=256 << 20, switching="shadow")
    torch.manual_seed(0)
    engine = Engine(config, model=Qwen2VLForConditionalGeneration(ranks_config(num_layers)).eval(), clock=clock)
    trainings = engine.parts.trainings
    trainings.load_processor = lambda: InputProcessor.from_pretrained(checkpoint_path())
    trainings.load_processor()
    trainings.start(str(folder / "plan.yaml"))
    while trainings.statuses()[0].step < 2:  # the prices of pieces are known from then on
        if not trainings.advance():
            time.sleep(_POLL_S)
    return engine


def request(number: int) -> Request:
    ids = tuple(random.Random(number).choices(range(5, 8000), k=PROMPT))
    sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    return Request(request_id=str(number), prompt_ids=ids, sampling=sampling)


def measure_capacity(engine: Engine, clock: Clock) -> float:
    """Requests per second with a queue that is never empty."""
    num_requests = 64
    for warm in (True, False):
        found = Served()
        serve(engine, clock, [0.0] * (8 if warm else num_requests), None, found)
    return num_requests / found.seconds


def serve(engine: Engine, clock: Clock, times: Sequence[float], slowdown: float | None, found: Served) -> None:
    """Serve requests that arrive at these times after now. slowdown: the promise; None: no training."""
    trainings = engine.parts.trainings
    trainings.promise.slowdown = slowdown or SLOWDOWN
    began, tokens_before = clock(), trainings.statuses()[0].num_tokens

    def idle(next_s: float) -> None:
        """Train, or skip to the next arrival or to the next piece that the promise allows."""
        if slowdown is None:
            clock.skip_to(next_s)
        elif not trainings.advance():
            retry_s = trainings.retry_s
            if retry_s is None:  # for the training's thread
                time.sleep(_POLL_S)
                retry_s = _POLL_S
            clock.skip_to(min(next_s, clock() + retry_s))

    for outputs in steps(engine, times, lambda number: engine.add(request(number)), clock, idle):
        ended = [output for output in outputs if output.finished]
        found.latencies_s += [clock() - began - times[int(output.request_id)] for output in ended]
        if slowdown is not None:
            trainings.advance()
    found.seconds += clock() - began
    found.num_tokens += trainings.statuses()[0].num_tokens - tokens_before


def rows_of(seconds: str, load: float, rate: float, found: dict[str, Served]) -> list[dict[str, Any]]:
    """One row for each way. seconds: "processor" or "wall"."""
    alone = found["alone"]
    return [
        {
            "seconds": seconds,
            "load": load,
            "requests a second": rate,
            "way": way,
            "p50, ms": 1e3 * percentile(own.latencies_s, 50),
            "p99, ms": 1e3 * percentile(own.latencies_s, 99),
            "p99 over alone": percentile(own.latencies_s, 99) / percentile(alone.latencies_s, 99),
            "trained tokens a second": own.num_tokens / own.seconds,
        }
        for way, own in found.items()
    ]


def goals_of(measured: Measured) -> list[Goal]:
    """The promise at each load, with some progress, in processor seconds."""
    goals = []
    rows = [row for row in measured.rows if row["seconds"] == "processor"]
    for row in rows:
        if row["way"] == "beside":
            goals.append(
                Goal(f"p99 over that alone at {row['load']} of capacity", row["p99 over alone"], SLOWDOWN, True)
            )
    first = next(row for row in rows if row["way"] == "beside")
    what = f"trained tokens a second at {first['load']} of capacity"
    goals.append(Goal(what, first["trained tokens a second"], 10.0, False))
    return goals


BENCH = Bench(name="training", measure=measure, goals=goals_of)
