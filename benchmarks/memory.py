"""The cost of thousands of adapters when the arena holds a few dozen: registration, memory, and throughput.

Requests select adapters by a power law (S-LoRA section 7.2, exponent 1), with a fixed number of concurrent requests.
The baseline is the same engine with requests for its 100 most popular adapters only. Throughput counts from the
completion of the first few dozen requests: before that, all requests wait for a first adapter. It is measured in the
process's own CPU time, including the threads that read and copy, so that other load on the machine does not affect it.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vlora.bench.dummy import language_shapes, small_config, write_adapter
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.timed_engine import TimedEngine
from vlora.config import EngineConfig
from vlora.engine import Engine
from vlora.memory.arena import PAGE_BYTES
from vlora.models.loading import dummy_model
from vlora.simulator.popularity import power_law

_NUM_ADAPTERS = 2000
_FEW = 100
_NUM_RESIDENT = 64
_RANK = 8
_UNDER_WAY = 64  # two batches: one runs, and the adapters of the other load meanwhile
_PROMPT, _ANSWER = 32, 16  # tokens
_WARM_UP = 64  # requests


def measure(quick: bool) -> Measured:
    """Serve a model of 5 million parameters on one thread; quick: fewer requests, once."""
    torch.set_num_threads(1)
    num_requests, rounds = (200, 1) if quick else (600, 3)
    with tempfile.TemporaryDirectory() as folder:
        model = dummy_model(small_config(vision="none"), "bfloat16", torch.device("cpu"), seed=0)
        shapes = language_shapes(model)
        paths = {f"a{i}": write_adapter(Path(folder) / f"a{i}", shapes, _RANK, seed=i) for i in range(_NUM_ADAPTERS)}
        pages = -(-_own_bytes(shapes, _RANK) // PAGE_BYTES)
        settings = EngineConfig(model="dummy", max_context=256, arena_bytes=2 * _NUM_RESIDENT * pages * PAGE_BYTES)
        timed = TimedEngine(settings, model, background=True)
        engine = timed.engine
        gc.freeze()  # as in the engine's process after start: later collections visit the adapters only
        started = time.perf_counter()
        engine.register_adapters(paths)
        register_s = time.perf_counter() - started
        loading_s = _record_loading_times(engine)

        def load(num_adapters: int, seed: int) -> _ServedRun:
            return _run_requests(timed, num_adapters, num_requests, seed, loading_s)

        # The first run reads all adapters from files; afterwards they are in host memory.
        first_use = load(_NUM_ADAPTERS, seed=0)
        for seed in range(rounds):
            for num_adapters in (_FEW, _NUM_ADAPTERS):
                load(num_adapters, seed)
        few, many = [], []
        for seed in range(rounds):
            few.append(load(_FEW, seed))
            many.append(load(_NUM_ADAPTERS, seed))
        engine.check_integrity()
        worst_overhead = max(_overhead(engine, Path(folder), shapes, rank) for rank in (1, 4, 8, 12, 16, 64))
    gc.unfreeze()
    ratio = statistics.median(m.requests_s / f.requests_s for m, f in zip(many, few, strict=True))
    rows = [
        _row(f"{_NUM_ADAPTERS}, read at first use", [first_use]),
        _row(f"{_FEW}, in host memory", few),
        _row(f"{_NUM_ADAPTERS}, in host memory", many),
    ]
    goals = [
        Goal(f"throughput, {_NUM_ADAPTERS} adapters / {_FEW}, the arena holding {_NUM_RESIDENT}", ratio, 0.9, False),
        Goal("steps that waited for a load", sum(each.load_waits for each in (*few, *many)), 0, True),
        Goal(f"registering {_NUM_ADAPTERS} adapters, s", register_s, 10.0, True),
        Goal("an adapter's memory beyond its own bytes, of 1 % or 64 KiB allowed", worst_overhead, 1.0, True),
    ]
    return Measured(rows, goals=goals)


BENCH = Bench(name="memory", measure=measure)


class _ServedRun(NamedTuple):
    """One run of requests."""

    requests_s: float  # requests per CPU second
    distinct: int  # number of adapters used
    loads: int  # number of loads
    load_waits: int  # steps in which no request could run before an adapter was loaded
    loading_ms: list[float]  # CPU time of each step for collecting and starting loads
    step_ms: list[float]  # CPU time of each step


def _run_requests(
    timed: TimedEngine, num_adapters: int, num_requests: int, seed: int, loading_s: list[float]
) -> _ServedRun:
    engine = timed.engine
    draws = random.Random(seed)
    names = draws.choices(
        [f"a{i}" for i in range(num_adapters)], power_law(num_adapters, 1.0), k=_WARM_UP + num_requests + _UNDER_WAY
    )
    wanted = iter(names)
    under_way = [timed.add(_PROMPT, _ANSWER, next(wanted)) for _ in range(_UNDER_WAY)]
    done = 0
    started, before, step_ms = 0.0, engine.stats(), list[float]()
    counted = 0
    while done < _WARM_UP + num_requests:
        began = time.process_time()
        outputs = timed.step()
        step_ms.append((time.process_time() - began) * 1e3)
        for output in outputs:
            if output.finished:
                done += 1
                under_way.remove(output.request_id)
                if len(under_way) + done < len(names):
                    under_way.append(timed.add(_PROMPT, _ANSWER, next(wanted)))
        if not counted and done >= _WARM_UP:
            started, before, counted = time.process_time(), engine.stats(), done
            step_ms.clear()
            loading_s.clear()
    seconds = time.process_time() - started
    after = engine.stats()
    found = _ServedRun(
        requests_s=(done - counted) / seconds,
        distinct=len(set(names)),
        loads=after.num_adapter_loads - before.num_adapter_loads,
        load_waits=after.num_load_waits - before.num_load_waits,
        loading_ms=[each * 1e3 for each in loading_s],
        step_ms=step_ms,
    )
    for request_id in under_way:
        engine.cancel(request_id)
    return found


def _record_loading_times(engine: Engine) -> list[float]:
    """Record the seconds that each subsequent step spends on its adapters: collecting, evicting, starting copies and
    reads.
    """
    spent: list[float] = []
    loader = engine.parts.loader
    inner = loader.load_needed

    def load_needed() -> None:
        started = time.perf_counter()
        inner()
        spent.append(time.perf_counter() - started)

    loader.load_needed = load_needed  # type: ignore[method-assign]
    return spent


def _own_bytes(shapes: Mapping[str, tuple[int, int]], rank: int) -> int:
    return sum(2 * rank * (d_out + d_in) for d_out, d_in in shapes.values())


def _overhead(engine: Engine, folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int) -> float:
    """Memory per adapter in the arena and in host memory beyond its own bytes, the larger of the two, relative to the
    allowed overhead: 1 % of the adapter, or 64 KiB if that is more.
    """
    own = _own_bytes(shapes, rank)
    before = engine.stats()
    name = f"rank{rank}"
    engine.load_adapter(name, write_adapter(folder / name, shapes, rank, seed=rank))
    in_host = engine.stats().host_adapter_bytes - before.host_adapter_bytes
    for status in engine.adapters():
        if status.resident:
            engine.unload_adapter(status.name)
    nothing = engine.stats().adapter_bytes
    engine.pin_adapter(name, True)
    in_arena = engine.stats().adapter_bytes - nothing
    engine.unload_adapter(name)
    return (max(in_host, in_arena) - own) / max(own / 100, 64 * 1024)


def _row(what: str, found: list[_ServedRun]) -> dict[str, Any]:
    steps = sorted(itertools.chain.from_iterable(each.step_ms for each in found))
    return {
        "adapters": what,
        "asked for": round(statistics.mean(each.distinct for each in found)),
        "requests / CPU s": statistics.median(each.requests_s for each in found),
        "loads": sum(each.loads for each in found),
        "load waits": sum(each.load_waits for each in found),
        "step ms": statistics.median(steps),
        "longest step ms": steps[-1],
        "on adapters ms": statistics.mean(itertools.chain.from_iterable(each.loading_ms for each in found)),
    }
