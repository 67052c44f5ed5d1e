"""`vlora bench training`: requests beside a training in one engine, with the latency promise, and without one.

Times are processor seconds of the engine's thread, to which the gaps are added in which it has nothing to do, so that
other load on the machine hardly counts: an idle engine without training skips to the next arrival. The ways run by
turns with the same arrivals.

A training in a process of its own competes for the processor, so it is compared in wall time, with the engine and that
process on one core: run this part on an otherwise idle machine.
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
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import yaml
from transformers import Qwen2VLForConditionalGeneration

from benchmarks.trainer_process import CLASSES, TrainerProcess
from fusion.embedded import checkpoint_path
from vlora.bench.dummy import ranks_config
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.timing import threads
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


class Clock(Protocol):
    """Seconds."""

    def __call__(self) -> float: ...

    def skip_to(self, when_s: float) -> None:
        """Let the time pass until `when_s`, which may be over."""


class WallClock:
    """A `Clock` of real time."""

    def __call__(self) -> float:
        return time.perf_counter()

    def skip_to(self, when_s: float) -> None:
        time.sleep(max(0.0, when_s - self()))


class EngineClock:
    """Processor seconds of this thread, and the time that was skipped."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self._skipped_s

    def skip_to(self, when_s: float) -> None:
        self._skipped_s += max(0.0, when_s - self())


@dataclasses.dataclass
class Served:
    """What one way measured. latencies_s: of its requests. seconds: of its runs. num_tokens: trained meanwhile."""

    latencies_s: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    num_tokens: int = 0

    def quantile_s(self, share: float) -> float:
        return sorted(self.latencies_s)[int(share * (len(self.latencies_s) - 1))]


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
        clock = EngineClock()
        engine = start(Path(folder), size.layers, clock)
        capacity = measure_capacity(engine, clock)
        for load in size.loads:
            found = {way: Served() for way in WAYS}
            for number in range(size.rounds):
                gaps = arrivals(size.requests, load * capacity, seed=number)
                for way, slowdown in WAYS.items():
                    serve(engine, clock, gaps, slowdown, found[way])
            rows += rows_of("processor", load, load * capacity, found)
        engine.close()
    return rows


def in_processes(size: Size) -> list[dict[str, Any]]:
    """The rows in wall time: no training, one in the engine with the promise, and one in a process of each class."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as opened:
        folder, clock = Path(name), WallClock()
        engine = start(folder, size.layers, clock)
        processes: dict[str, TrainerProcess] = {}
        for kind in CLASSES:
            processes[kind] = TrainerProcess(folder, size.layers, kind)
            opened.callback(processes[kind].close)
        capacity = measure_capacity(engine, clock)
        for load in size.loads:
            found = {way: Served() for way in ("alone", "beside", *CLASSES)}
            for number in range(size.rounds):
                gaps = arrivals(size.requests, load * capacity, seed=number)
                serve(engine, clock, gaps, None, found["alone"])
                serve(engine, clock, gaps, SLOWDOWN, found["beside"])
                for kind, process in processes.items():
                    before = process.num_tokens
                    process.resume()
                    serve(engine, clock, gaps, None, found[kind])
                    process.pause()
                    found[kind].num_tokens += process.num_tokens - before
            rows += rows_of("wall", load, load * capacity, found)
        engine.close()
    return rows


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
    training = {"name": "trained", "data": "data.jsonl", "steps": 10**6, "held_out": 0}
    (folder / "plan.yaml").write_text(yaml.safe_dump({"folder": "out", "trainings": [training]}))
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


def arrivals(num_requests: int, rate: float, seed: int) -> list[float]:
    """Random times of arrival from 0, in order."""
    draw = random.Random(seed)
    times = [0.0]
    for _ in range(num_requests - 1):
        times.append(times[-1] + draw.expovariate(rate))
    return times


def request(number: int) -> Request:
    ids = tuple(random.Random(number).choices(range(5, 8000), k=PROMPT))
    sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    return Request(request_id=f"r{number}", prompt_ids=ids, sampling=sampling)


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
    due = deque((began + each, request(number)) for number, each in enumerate(times))
    arrived: dict[str, float] = {}
    while due or engine.has_work:
        while due and due[0][0] <= clock():
            when, each = due.popleft()
            engine.add(each)
            arrived[each.request_id] = when
        if engine.has_work:
            ended = [output for output in engine.step() if output.finished]
            found.latencies_s += [clock() - arrived[output.request_id] for output in ended]
            if slowdown is not None:
                trainings.advance()
        elif due and not (slowdown is not None and trainings.advance()):
            _idle(clock, due[0][0], None if slowdown is None else trainings.retry_s)
    found.seconds += clock() - began
    found.num_tokens += trainings.statuses()[0].num_tokens - tokens_before


def _idle(clock: Clock, next_s: float, retry_s: float | None) -> None:
    """Skip to the next arrival, or to the next piece that the promise allows; wait for the training's thread."""
    if retry_s is not None:
        next_s = min(next_s, clock() + retry_s)
    else:
        time.sleep(_POLL_S)
        next_s = min(next_s, clock() + _POLL_S)
    clock.skip_to(next_s)


def rows_of(seconds: str, load: float, rate: float, found: dict[str, Served]) -> list[dict[str, Any]]:
    """One row for each way. seconds: "processor" or "wall"."""
    alone = found["alone"]
    return [
        {
            "seconds": seconds,
            "load": load,
            "requests a second": rate,
            "way": way,
            "p50, ms": 1e3 * own.quantile_s(0.5),
            "p99, ms": 1e3 * own.quantile_s(0.99),
            "p99 over alone": own.quantile_s(0.99) / alone.quantile_s(0.99),
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
