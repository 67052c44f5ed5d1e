"""The serving engine's W0 as a base executor: memory, training through it, and requests beside a client."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arrivals import poisson
from benchmarks.split.processes import Process, run_together, running, training
from benchmarks.split.rows import TRAIN, Size, row
from vlora.bench.report import Goal
from vlora.bench.timing import by_turns

MEMORY, TRAINING, SERVING = (
    "memory of serving and a base for clients",
    "training, 128 tokens a step, nothing else",
    "requests beside a training client",
)
BOTH, OWN = "an engine, and a base executor", "an engine that serves its base"
ALONE, BESIDE = "no client", "one training client"
DTYPES = ("float32", "bfloat16")
LOAD = 0.5  # of the engine's capacity
_QUEUED = 32  # requests at once, which measure the capacity


def measure(checkpoint: Path, size: Size) -> list[dict[str, Any]]:
    """All rows of this part."""
    return [*_memory(checkpoint), *_training(checkpoint, size), *_serving(checkpoint, size)]


def _engine(checkpoint: Path, address: str) -> Process:
    return Process("engine_process", str(checkpoint), "--base", address)


def _address(checkpoint: Path, name: str) -> str:
    return f"unix:{checkpoint.parent}/{name}.sock"


def _memory(checkpoint: Path) -> list[dict[str, Any]]:
    """PSS after some requests and two training steps of one client.

    In float32, the type of the file, a base executor only maps it, as the client does; in bfloat16 it has a copy.
    """
    found: list[dict[str, Any]] = []
    for dtype, way in itertools.product(DTYPES, (BOTH, OWN)):
        address = _address(checkpoint, f"memory{len(found)}")
        options = (str(checkpoint), "--dtype", dtype)
        engine = Process("engine_process", *options, *(("--base", address) if way == OWN else ()))
        bases = [Process("base_process", options[0], address, *options[1:])] if way == BOTH else []
        with running(engine, *bases), running(Process("worker", *options, "--base", address)) as clients:
            engine.ask([0.0] * 4)
            run_together(clients, [TRAIN | {"steps": 2}])
            servers, own = sum(each.pss_mib() for each in (engine, *bases)), clients[0].pss_mib()
            sizes = {"executor MiB": servers, "clients MiB": own, "all MiB": servers + own}
            found.append(row(f"{MEMORY}, {dtype}", way, clients=1, **sizes))
    return found


def _training(checkpoint: Path, size: Size) -> list[dict[str, Any]]:
    """Processor time and duration of training through an idle engine, beside those through a base executor."""
    addresses = {BOTH: _address(checkpoint, "base"), OWN: _address(checkpoint, "engine")}
    executors = {
        BOTH: Process("base_process", str(checkpoint), addresses[BOTH]),
        OWN: _engine(checkpoint, addresses[OWN]),
    }
    with (
        running(*executors.values()),
        running(*(Process("worker", str(checkpoint), "--base", addresses[way]) for way in executors)) as workers,
    ):

        def step(way: str, worker: Process) -> tuple[float, float]:
            before = executors[way].cpu_s()
            (answer,) = run_together([worker], [TRAIN | {"steps": 2}])
            cpu_s = executors[way].cpu_s() - before + answer["cpu_s"]
            return 1e3 * cpu_s / answer["tokens"], 1e3 * answer["wall_s"] / 2

        calls = {way: functools.partial(step, way, worker) for way, worker in zip(executors, workers, strict=True)}
        times = by_turns(calls, size.rounds)
    return [
        row(
            TRAINING,
            way,
            clients=1,
            ratio=statistics.median(a[0] / b[0] for a, b in zip(values, times[BOTH], strict=True)),
            **{
                "CPU ms a token": statistics.median(cpu for cpu, _ in values),
                "latency ms": statistics.median(wall for _, wall in values),
            },
        )
        for way, values in times.items()
    ]


def _serving(checkpoint: Path, size: Size) -> list[dict[str, Any]]:
    """Latencies of requests at random times, the same of both ways, with and without a client that trains."""
    address = _address(checkpoint, "serving")
    with (
        running(_engine(checkpoint, address)) as (engine,),
        running(Process("worker", str(checkpoint), "--base", address)) as (client,),
    ):
        run_together([client], [TRAIN])
        for _ in range(2):  # the first time warms up
            rate = LOAD * _QUEUED / engine.ask([0.0] * _QUEUED)["seconds"]
        latencies: dict[str, list[Sequence[float]]] = {ALONE: [], BESIDE: []}
        tokens_s: list[float] = []
        for turn in range(size.rounds):
            times = poisson(rate, 2 * _QUEUED + 1, seed=turn)
            latencies[ALONE] += engine.ask(times)["latencies_s"]
            with training(client, checkpoint.parent / "stop") as answer:
                latencies[BESIDE] += engine.ask(times)["latencies_s"]
            tokens_s.append(answer["tokens"] / answer["wall_s"])
    rows = []
    for clock, what in enumerate((SERVING, f"{SERVING}, wall time", f"{SERVING}, without products for it")):
        p99_ms = {
            way: 1e3 * statistics.quantiles([one[clock] for one in each], n=100)[-1] for way, each in latencies.items()
        }
        rows += [
            row(
                what,
                way,
                clients=int(way == BESIDE),
                ratio=p99_ms[way] / p99_ms[ALONE],
                training=statistics.median(tokens_s) if way == BESIDE else None,
                **{"latency ms": p99_ms[way]},
            )
            for way in latencies
        ]
    return rows


def goals_of(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """The goals of this part's rows."""
    found = {(each["what"], each["way"]): each for each in rows}
    if (TRAINING, OWN) not in found:
        return []
    memory = [
        Goal(
            f"memory of an engine that serves its base, beside an engine and a base executor, {dtype}",
            found[what, OWN]["executor MiB"] / found[what, BOTH]["executor MiB"],
            0.9,
            True,
        )
        for dtype, what in ((dtype, f"{MEMORY}, {dtype}") for dtype in DTYPES)
    ]
    through, serving = found[TRAINING, OWN]["ratio"], found[SERVING, BESIDE]["ratio"]
    return [
        *memory,
        Goal("training through an idle engine, CPU time beside a base executor", through, 1.1, True),
        Goal("p99 of requests beside a training client, beside alone", serving, 1.15, True),
    ]
