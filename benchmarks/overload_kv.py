"""Several times as many outstanding requests as KV memory holds, simulated and on the engine, under every policy.

Each load is served twice: with all requests submitted at once, and with each submitted once its whole length fits next
to all earlier ones. The ratio of the two throughputs is the cost of overload.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from vlora.bench.dummy import language_shapes, small_config
from vlora.bench.report import Goal
from vlora.bench.timed_engine import TimedEngine
from vlora.config import EngineConfig
from vlora.memory.arena import PAGE_BYTES
from vlora.models.loading import dummy_model
from vlora.orchestrator import POLICIES, Costs, Scheduler, WaitStats
from vlora.simulator import Arrival, ReplicaConfig
from vlora.simulator.replica import Replica
from vlora.types import EngineStats

_ROOM = 24  # capacity of KV memory, in requests
_FACTORS = (2, 4, 16)
_ROUNDS = 5  # of the engine, each served both ways; the median counts
_ADAPTERS = 3
_BLOCK = 16
_UNBOUNDED = "merged_only"  # it has no waiting bound


class _KvRun(NamedTuple):
    """One run of requests."""

    seconds: float  # from the first request to the last answer
    stats: EngineStats  # of this run
    waits_s: Sequence[float]  # waits of admitted requests, from step to step
    bound_s: float  # the waiting bound


class _RecordedWaits(WaitStats):
    """Records every wait."""

    def __init__(self, max_batch_size: int) -> None:
        super().__init__(max_batch_size)
        self.each_s: list[float] = []

    def record_wait(self, seconds: float) -> None:
        super().record_wait(seconds)
        self.each_s.append(seconds)


def rows(costs: Costs, quick: bool) -> Iterator[dict[str, Any]]:
    """A row for each policy and factor, of the simulator and of the engine."""
    factors = _FACTORS[:-1] if quick else _FACTORS
    for policy in POLICIES:
        for factor in factors:
            arrivals = _arrivals(factor * _ROOM, 256, 32)
            fed, crowd = (_simulated(costs, policy, arrivals, feeding) for feeding in (True, False))
            yield _row("simulated", policy, factor, fed.seconds / crowd.seconds, [crowd])
    for policy in POLICIES:
        engine = _engine(policy)
        for factor in factors:
            arrivals = _arrivals(factor * _ROOM, 64, 32)
            ratios, crowds = [], []
            for number in range(1 if quick else _ROUNDS):
                # The order alternates, so that a drift in the machine's speed favours neither.
                order = (True, False) if number % 2 == 0 else (False, True)
                runs = {feeding: _run_arrivals(engine, arrivals, feeding) for feeding in order}
                ratios.append(runs[True].seconds / runs[False].seconds)
                crowds.append(runs[False])
            yield _row("engine", policy, factor, statistics.median(ratios), crowds)
        engine.engine.close()


def goals(found: Sequence[dict[str, Any]]) -> Iterator[Goal]:
    """Limits on the cost of overload, worst of each side."""
    for where in ("simulated", "engine"):
        rows = [row for row in found if row["where"] == f"KV room, {where}"]
        yield Goal(f"throughput / fed as room frees, worst, {where}", min(r["of fed"] for r in rows), 0.9, False)
        worst = max(row["computed / needed"] for row in rows)
        yield Goal(f"tokens computed / needed, worst, {where}", worst, 1.15, True)
        worst = max(row["wait p99 / bound"] for row in rows if row["policy"] != _UNBOUNDED)
        yield Goal(f"p99 of waits of entered requests / their bound, worst, {where}", worst, 1.0, True)


def _row(where: str, policy: str, factor: int, ratio: float, runs: Sequence[_KvRun]) -> dict[str, Any]:
    """A row of the report."""
    computed = sum(run.stats.num_step_tokens for run in runs) / sum(run.stats.num_needed_tokens for run in runs)
    waits_s = sorted(wait for run in runs for wait in run.waits_s)
    p99_s = waits_s[int(0.99 * (len(waits_s) - 1))]
    bound_s = max(run.bound_s for run in runs)
    return {
        "where": f"KV room, {where}",
        "workload": f"{factor} times the room",
        "policy": policy,
        "of fed": ratio,
        "computed / needed": computed,
        "preemptions": sum(run.stats.num_preemptions for run in runs),
        "wait p99 s": p99_s,
        "wait bound s": bound_s,
        "wait p99 / bound": p99_s / bound_s,
    }


def _arrivals(number: int, prompt: int, answer: int) -> list[Arrival]:
    """Prompts and answers of random length, between half and all of these lengths."""
    draws = random.Random(0)
    return [
        Arrival(
            0.0,
            f"a{draws.randrange(_ADAPTERS)}",
            draws.randint(prompt // 2, prompt),
            draws.randint(answer // 2, answer),
        )
        for _ in range(number)
    ]


def _num_blocks(arrival: Arrival) -> int:
    return -(-(arrival.prompt_tokens + arrival.answer_tokens - 1) // _BLOCK)


def _serve(
    arrivals: Sequence[Arrival],
    *,
    room: int | None,
    add: Callable[[str, Arrival], object],
    step: Callable[[], Collection[str]],
) -> None:
    """Submit the requests and run steps until all have ended."""
    waiting = deque(enumerate(arrivals))
    left = len(arrivals)
    while left:
        while waiting and (room is None or _num_blocks(waiting[0][1]) <= room):
            number, arrival = waiting.popleft()
            add(str(number), arrival)
            room = None if room is None else room - _num_blocks(arrival)
        for request_id in step():
            left -= 1
            room = None if room is None else room + _num_blocks(arrivals[int(request_id)])


def _simulated(costs: Costs, policy: str, arrivals: Sequence[Arrival], feeding: bool) -> _KvRun:
    room = _ROOM * -(-288 // _BLOCK)
    config = ReplicaConfig(
        costs=costs, policy=policy, kv_tokens=room * _BLOCK, resident_adapters=_ADAPTERS, block_size=_BLOCK
    )
    replica = Replica(config)
    waits = _record_waits(replica.scheduler, config.max_batch_size)

    def step() -> list[str]:
        batch = replica.decide()
        assert batch is not None, "adapters come at once"
        return [output.request_id for output in replica.record(batch)]

    _serve(arrivals, room=room if feeding else None, add=replica.add, step=step)
    return _KvRun(replica.clock.now, replica.stats(), waits.each_s, waits.bound_s)


def _record_waits(scheduler: Scheduler, max_batch_size: int) -> _RecordedWaits:
    scheduler.waits = waits = _RecordedWaits(max_batch_size)
    return waits


# -- the engine -------------------------------------------------------------------------------------------------------


def _engine(policy: str) -> TimedEngine:
    """Four layers, 5 million parameters, float32, all cores; three adapters of rank 16, already in memory and used."""
    model = dummy_model(small_config(), "float32", torch.device("cpu"), seed=0)
    shapes = language_shapes(model)
    blocks = _ROOM * -(-96 // _BLOCK)
    # A KV block takes one page here; adapters take the rest.
    adapter_pages = _ADAPTERS * -(-sum(16 * (d_in + d_out) * 4 for d_out, d_in in shapes.values()) // PAGE_BYTES)
    settings = EngineConfig(
        model="dummy",
        policy=policy,
        arena_bytes=(blocks + adapter_pages + _ADAPTERS) * PAGE_BYTES,
        block_size=_BLOCK,
        prefix_cache=False,
        merge_fidelity_floor=0.0,
    )
    engine = TimedEngine(settings, model, {f"a{number}": 16 for number in range(_ADAPTERS)}, background=True)
    _run_arrivals(engine, _arrivals(_ROOM, 64, 32), True, room=blocks // 2)
    return engine


def _run_arrivals(engine: TimedEngine, arrivals: Sequence[Arrival], feeding: bool, room: int | None = None) -> _KvRun:
    """Run the arrivals, and count this run only."""
    whole = engine.engine
    waits, before = _record_waits(whole.parts.scheduler, whole.config.max_batch_size), whole.stats()

    def add(request_id: str, arrival: Arrival) -> None:
        engine.add(arrival.prompt_tokens, arrival.answer_tokens, arrival.adapter, request_id=request_id)

    def step() -> list[str]:
        return [output.request_id for output in engine.step() if output.finished]

    started = time.perf_counter()
    _serve(arrivals, room=(room or before.free_blocks) if feeding else None, add=add, step=step)
    seconds = time.perf_counter() - started
    return _KvRun(seconds, _stats_since(before, whole.stats()), waits.each_s, waits.bound_s)


def _stats_since(before: EngineStats, now: EngineStats) -> EngineStats:
    names = ("num_step_tokens", "num_needed_tokens", "num_preemptions")
    return msgspec.structs.replace(now, **{name: getattr(now, name) - getattr(before, name) for name in names})
