"""The effect of loading adapters on concurrent steps: p99 of a step with loads, and without.

Eight requests decode continuously, on all cores. Windows with and without loads alternate: in the first kind, adapters
of rank 64 are loaded one after another, as by a client that waits for each response; a window without loads precedes
it, and another one follows. Other work on the machine makes the p99 of the windows without loads differ
among themselves; the goal allows as much more.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from vlora.bench.dummy import language_shapes, ranks_config, write_adapter
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.timed_engine import TimedEngine
from vlora.bench.timing import percentile
from vlora.config import EngineConfig
from vlora.engine import Engine
from vlora.engine.host_resources import default_threads
from vlora.models.loading import dummy_model
from vlora.types import AdapterStatus

_NUM_LAYERS = 4
_NUM_FOLDERS = 10  # each is loaded under several names, and read every time
_RANK = 64
_BATCH = 8
_PROMPT, _ANSWER = 32, 400  # tokens
_WARM_UP = 50  # steps
_WINDOW = 100  # steps without loads before and after those with loads


def measure(quick: bool) -> Measured:
    """Load 200 adapters (quick: 60) of a model with 60 million parameters in its layers, float32."""
    num_rounds = 6 if quick else 20
    config = EngineConfig(
        model="dummy", max_context=512, arena_bytes=2**30, max_batch_size=_BATCH, threads=default_threads()
    )
    model = dummy_model(ranks_config(_NUM_LAYERS), "float32", torch.device("cpu"), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        shapes = language_shapes(model)
        paths = [write_adapter(Path(folder) / f"a{i}", shapes, _RANK, seed=i) for i in range(_NUM_FOLDERS)]
        engine = TimedEngine(config, model, {"used": paths[0]}, background=True)
        steps = _steps(engine)
        for _ in range(_WARM_UP):
            next(steps)
        before: list[float] = []
        beside: list[float] = []
        after: list[float] = []
        load_s: list[float] = []
        for number in range(num_rounds):
            before += itertools.islice(steps, _WINDOW)
            beside += _load(engine.engine, steps, {f"r{number}-{i}": path for i, path in enumerate(paths)}, load_s)
            after += itertools.islice(steps, _WINDOW)
        engine.engine.close()
    alone = [*before, *after]
    rows = [_row("no loads", alone), _row(f"{len(load_s)} loads of rank {_RANK}", beside)]
    tails = sorted((percentile(before, 99), percentile(after, 99)))
    differ = tails[1] / tails[0]
    name = f"p99 of steps with loads / without; two halves of those without: {differ:.3f}"
    goals = [Goal(name, percentile(beside, 99) / percentile(alone, 99), 1.1 * differ, True)]
    found = {"threads": engine.engine.num_threads, "load_s": round(statistics.median(load_s), 3)}
    return Measured(rows, found, goals)


BENCH = Bench(name="loading", measure=measure)


def _steps(engine: TimedEngine) -> Iterator[float]:
    """Seconds of consecutive steps with a full decoding batch; half of the requests use an adapter."""
    running: set[str] = set()
    while True:
        for number in range(len(running), _BATCH):
            running.add(engine.add(_PROMPT, _ANSWER, "used" if number % 2 else None))
        while len(running) == _BATCH:
            started = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - started
            running -= {output.request_id for output in outputs if output.finished}
            yield seconds


def _load(engine: Engine, steps: Iterator[float], paths: dict[str, str], load_s: list[float]) -> list[float]:
    """Load all adapters, then unload them; the seconds of the steps until the last load."""
    window: list[float] = []
    for name, path in paths.items():
        started = time.perf_counter()
        loading: Future[AdapterStatus] = engine.load_in_background(name, path)
        while not loading.done():
            window.append(next(steps))
        loading.result()
        load_s.append(time.perf_counter() - started)
    for name in paths:
        engine.unload_adapter(name)
    return window


def _row(what: str, seconds: list[float]) -> dict[str, Any]:
    return {
        "beside the steps": what,
        "steps": len(seconds),
        "p50 ms": statistics.median(seconds) * 1e3,
        "p99 ms": percentile(seconds, 99) * 1e3,
        "longest ms": max(seconds) * 1e3,
    }
