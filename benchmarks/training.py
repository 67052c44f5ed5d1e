"""`vlora bench training`: requests beside a training in one engine, with the latency promise, and without one.

Times are processor seconds of the engine's thread, to which the gaps are added in which it has nothing to do, so that
other load on the machine hardly counts: an idle engine without training skips to the next arrival. The ways run by
turns with the same arrivals.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import Qwen2VLForConditionalGeneration

from benchmarks.arrivals import Clock, poisson, steps
from fusion.embedded import checkpoint_path
from vlora.bench.dummy import ranks_config
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.timing import threads
from vlora.config import EngineConfig
from vlora.engine import Engine
from vlora.models.processing import InputProcessor
from vlora.simulator.measures import percentile
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
    size = QUICK if quick else FULL
    rows: list[dict[str, Any]] = []
    with threads(1), tempfile.TemporaryDirectory() as folder:
        clock = Clock(time.thread_time)
        engine = start(Path(folder), size.layers, clock)
        capacity = measure_capacity(engine, clock)
        for load in size.loads:
            found = {way: Served() for way in WAYS}
            for number in range(size.rounds):
                gaps = poisson(load * capacity, size.requests, seed=number)
                for way, slowdown in WAYS.items():
                    serve(engine, clock, gaps, slowdown, found[way])
            rows += rows_of(load, load * capacity, found)
        engine.close()
    return Measured(rows)


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


def rows_of(load: float, rate: float, found: dict[str, Served]) -> list[dict[str, Any]]:
    alone = found["alone"]
    return [
        {
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
    """The promise at each load, with some progress."""
    rows = [row for row in measured.rows if row["way"] == "beside"]
    slower = [
        Goal(f"p99 over that alone at {row['load']} of capacity", row["p99 over alone"], SLOWDOWN, True) for row in rows
    ]
    what, trained = f"trained tokens a second at {rows[0]['load']} of capacity", rows[0]["trained tokens a second"]
    return [*slower, Goal(what, trained, 10.0, False)]


BENCH = Bench(name="training", measure=measure, goals=goals_of)
