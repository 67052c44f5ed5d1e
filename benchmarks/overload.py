"""The effect of early rejection at three times the machine's capacity, and of admission by KV room with more requests
than memory holds (`overload_kv`), both simulated and on the real engine.

The goal: 95 % of the admitted requests get their first token within the bound, and the machine still completes 80 % of
its capacity; all other requests get a typed rejection before the bound has passed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import overload_kv
from benchmarks.arrivals import WallClock, steps
from benchmarks.policy import decision_ms
from vlora.bench.dummy import half_billion_config
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.timed_engine import TimedEngine
from vlora.bench.timing import percentile
from vlora.config import EngineConfig
from vlora.errors import DeadlineUnreachable
from vlora.models.loading import dummy_model
from vlora.orchestrator import POLICIES, Costs
from vlora.simulator import MEASURED, Arrival, ReplicaConfig, make_workload, read_costs, replay
from vlora.types import RequestOutput

_LOAD = 3.0
_NO_BOUND_S = 1e9
_BOUNDED = tuple(name for name in POLICIES if name != "merged_only")  # it has no waiting bound
# Workload, and its bounds on the first token in seconds: about two and five times the time of a request alone.
_WORKLOADS = (
    ("retrieval", "hottest:prompt_min=192,prompt_max=320,answer_min=150,answer_max=250", (1.5, 5.0)),
    ("questions", "hottest:prompt_min=192,prompt_max=320,answer_min=8,answer_max=32", (1.5, 5.0)),
    ("video", "hottest:prompt_min=1536,prompt_max=1536,answer_min=0,answer_max=0", (6.0, 15.0)),
)
_ADAPTERS = 20


def measure(quick: bool) -> Measured:
    """Replay on the machine that the package's costs describe, then run a small model."""
    costs, load_s = read_costs(MEASURED)
    threads = torch.get_num_threads()
    crowds = list(overload_kv.rows(costs, quick))  # on all cores, so before the single-threaded part
    rows = [*_in_simulator(costs, load_s, 400), *_on_engine(90 if quick else 300)]
    goals = []
    for where in ("simulated", "engine"):
        found = [row for row in rows if row["where"] == where]
        goals.append(Goal(f"in time, of those let in, worst, {where}", min(r["in time"] for r in found), 0.95, False))
        goals.append(Goal(f"completed / capacity, worst, {where}", min(r["of capacity"] for r in found), 0.8, False))
        worst = max(row["refusal p99 s"] / row["bound s"] for row in found)
        goals.append(Goal(f"a refusal's time / bound, p99, worst, {where}", worst, 1.0, True))
    for policy in _BOUNDED:
        spent = decision_ms(policy, costs, max_ttft_s=_NO_BOUND_S, weight=("*=1",))
        goals.append(Goal(f"a decision with 1,000 waiting, bounds and fair shares, {policy}, ms", spent, 2.0, True))
    goals += overload_kv.goals(crowds)
    columns = dict.fromkeys([*rows[0], *crowds[0]])
    return Measured([columns | row for row in (*rows, *crowds)], {"threads of KV room, engine": threads}, goals)


BENCH = Bench(name="overload", measure=measure)


def _in_simulator(costs: Costs, load_s: float, num_requests: int) -> Iterator[dict[str, Any]]:
    for (name, text, bounds), policy in itertools.product(_WORKLOADS, _BOUNDED):

        def arrivals(rate: float, text: str = text) -> Iterator[Arrival]:
            return make_workload(f"{text},rate={rate}").arrivals(num_requests, _ADAPTERS, seed=0)

        # All at once and without a deadline, but admitted as there is room: the machine's capacity.
        config = ReplicaConfig(costs=costs, load_s=load_s, policy=policy, max_ttft_s=_NO_BOUND_S)
        capacity = replay(arrivals(1e6), config).as_dict()["requests_per_s"]
        for bound_s in bounds:
            config = ReplicaConfig(costs=costs, load_s=load_s, policy=policy, max_ttft_s=bound_s)
            found = replay(arrivals(_LOAD * capacity), config).as_dict()
            yield {
                **{"where": "simulated", "workload": name, "policy": policy, "bound s": bound_s},
                "capacity /s": capacity,
                "of capacity": found["requests_per_s"] / capacity,
                "in time": 1 - found["late"] / found["requests"],
                "refused": found["unreachable"] / num_requests,
                "ttft p90 s": found["ttft_s"]["p90"],
                "refusal p99 s": found["refusal_s"].get("p99", 0.0),
            }


# -- the real engine --------------------------------------------------------------------------------------------------


def _on_engine(num_requests: int) -> Iterator[dict[str, Any]]:
    """Four layers of the 0.5 B model's shapes, random weights, bfloat16, one thread; three adapters of rank 16."""
    torch.set_num_threads(1)
    model = dummy_model(half_billion_config(num_layers=4), "bfloat16", torch.device("cpu"), seed=0)
    settings = EngineConfig(
        model="dummy", max_batch_size=16, max_step_tokens=256, arena_bytes=2**30, merge_fidelity_floor=0.0
    )
    engine = TimedEngine(settings, model, {f"a{i}": 16 for i in range(3)}, background=True)
    _drive(engine, _requests(32, 1e6, seed=1), _NO_BOUND_S)  # trains the cost model and warms memory
    before = _drive(engine, _requests(num_requests // 3, 1e6, seed=2), _NO_BOUND_S).completed
    bound_s = 1.0
    found = _drive(engine, _requests(num_requests, _LOAD * before, seed=4), bound_s)
    after = _drive(engine, _requests(num_requests // 3, 1e6, seed=3), _NO_BOUND_S).completed
    capacity = (before + after) / 2  # averages over other load on the machine
    yield {
        **{"where": "engine", "workload": "questions", "policy": settings.policy, "bound s": bound_s},
        "capacity /s": capacity,
        "of capacity": found.completed / capacity,
        "in time": sum(each <= bound_s for each in found.ttft_s) / len(found.ttft_s),
        "refused": len(found.refusal_s) / num_requests,
        "ttft p90 s": percentile(found.ttft_s, 90),
        "refusal p99 s": percentile(found.refusal_s or [0.0], 99),
    }


def _requests(number: int, rate: float, seed: int) -> list[Arrival]:
    draws = random.Random(seed)
    now, found = 0.0, []
    for _ in range(number):
        now += draws.expovariate(rate)
        found.append(Arrival(now, f"a{draws.choice((0, 0, 0, 1, 2))}", draws.randint(48, 80), draws.randint(8, 24)))
    return found


class _OverloadRun:
    """completed: requests per second. Times are in seconds from a request's due time."""

    def __init__(self) -> None:
        self.completed = 0.0
        self.ttft_s: list[float] = []
        self.refusal_s: list[float] = []


def _drive(engine: TimedEngine, arrivals: Sequence[Arrival], bound_s: float) -> _OverloadRun:
    """Submit requests when they are due, or at the end of the running step; run until all have ended."""
    found = _OverloadRun()
    answered: set[str] = set()
    clock = WallClock()
    started = clock()

    def add(number: int) -> None:
        due_s, adapter, prompt, answer, *_ = arrivals[number]
        left_s = max(bound_s - (clock() - started - due_s), 1e-9)
        engine.add(range(3, 3 + prompt), answer, adapter, request_id=str(number), max_ttft_s=left_s)

    def note(outputs: Sequence[RequestOutput]) -> None:
        now = clock() - started
        for output in outputs:
            since_due = now - arrivals[int(output.request_id)].time_s
            if output.error is not None:
                assert output.error.code == DeadlineUnreachable.code, output.error
                found.refusal_s.append(since_due)
            elif output.request_id not in answered:
                answered.add(output.request_id)
                found.ttft_s.append(since_due)

    engine.engine.send_early = note
    for outputs in steps(engine.engine, [arrival.time_s for arrival in arrivals], add, clock):
        note(outputs)
    found.completed = len(answered) / (clock() - started)
    return found
