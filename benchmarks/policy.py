"""Comparison of policies on the same traffic and machine: V-LoRA's figures 14 and 19 to 23, simulated.

The machine is this one: the cost model is fitted to the real engine's steps at the start of the run, with a server's
default number of threads. All policies use the same operators and the same switch, so they differ only in the order of
requests and in the inference mode. The engine itself also runs a few points with pictures, with these threads and with
one, and so does the simulator: the prediction must be within the spread of repeats.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.policy_engine import BASELINE, FLOOR, OURS, SKEWS, measure_policies, most
from vlora.bench.costs import RANK, costs_as_dict, measure_costs
from vlora.bench.dummy import model_named
from vlora.bench.harness import Bench, Measured, Store
from vlora.bench.plots import Plot
from vlora.bench.report import Goal
from vlora.bench.timing import thread_counts, threads
from vlora.config import EngineConfig
from vlora.models.loading import device_of
from vlora.orchestrator import POLICIES, Costs
from vlora.simulator import Arrival, ReplicaConfig, replay
from vlora.simulator.popularity import hottest
from vlora.simulator.replica import Replica
from vlora.simulator.workloads import Hottest, Video

UNBOUNDED = "merged_only"  # its waits are unbounded, so its low average latency is not comparable
# Visual retrieval as in V-LoRA section 6.2: a prompt of about 256 tokens, an answer of about 200.
_RETRIEVAL = {"prompt_min": 192, "prompt_max": 320, "answer_min": 150, "answer_max": 250}
_PROMPT, _ANSWER = 256, 200


def cases(quick: bool, model: str = "qwen2-0.5b", device: str = "cpu") -> dict[str, tuple[bool, str, str]]:
    return {f"{model}, {device}": (quick, model, device)}


def measure(case: tuple[bool, str, str], store: Store) -> Measured:
    """Fit this machine's costs, replay every cell of the grid (quick: a corner) under every policy, run some on the
    engine.
    """
    quick, model, device = case
    on = device_of(EngineConfig(model=model, device=device), 0)
    fits, points = [], []
    for number in thread_counts() if device == "cpu" else [1]:
        with threads(number):
            found = store.value(f"fit, {number}", lambda: costs_as_dict(measure_costs(quick, model, device), model))
            fits.append(found)
            points += measure_policies(
                _costs(found),
                model_named(model),
                RANK,
                on,
                skews=SKEWS[:1] if quick else SKEWS,
                repeats=2 if quick else 3,
                num_requests=12 if quick else 60,
                once=store.value,
            )
    fitted = fits[0]
    costs, load_s = _costs(fitted), fitted["costs"]["load_s"]
    rows: list[dict[str, Any]] = []
    for cell in (*_retrieval(costs, quick), *_video(costs, quick)):
        name = f"{cell.app}, load {cell.load}, skew {cell.skew:g}, {cell.num_streams} streams, {cell.num_adapters}"
        rows.append(store.value(f"{name} adapters", functools.partial(_row, cell, costs, load_s)))
    goals = []
    for app in ("retrieval", "video"):
        ratios = [row["ours / best in bound"] for row in rows if row["app"] == app]
        name = f"{OURS} / best of those that kept the waiting bound, {app}, worst of {len(ratios)} cells"
        goals.append(Goal(name, max(ratios), 1.03, True))
    skewed = [row for row in rows if row["app"] == "retrieval" and row["skew"] >= 0.6 and row["load"] == 0.9]
    over = max(row[OURS] / row[BASELINE] / most(row["skew"], row[FLOOR] / row[BASELINE]) for row in skewed)
    goals.append(
        Goal(f"{OURS} / {BASELINE} over its limit, retrieval, skew 0.6 and above, load 0.9, worst", over, 1.0, True)
    )
    algorithm1 = statistics.median(row[OURS] / row["algorithm1"] for row in rows)
    goals.append(Goal(f"{OURS} / algorithm1, median of all cells", algorithm1, 1.0, True))
    for policy in POLICIES:
        goals.append(Goal(f"a decision with 1,000 waiting, {policy}, ms", decision_ms(policy, costs), 2.0, True))
    goals += itertools.chain.from_iterable(point.goals(saves=not quick) for point in points)
    return Measured(rows, {**fitted, "engine": [point.as_dict() for point in points]}, goals)


def _costs(found: Mapping[str, Any]) -> Costs:
    return Costs(**{name: found["costs"][name] for name in Costs._fields})


class Cell(NamedTuple):
    """A cell of the grid. rate: requests a second at this share of the capacity. skew: the hottest adapter's share."""

    app: str
    load: float
    rate: float
    skew: float
    num_adapters: int
    num_streams: int | None
    arrivals: tuple[Arrival, ...]


def _retrieval(costs: Costs, quick: bool) -> Iterator[Cell]:
    loads = (0.9,) if quick else (0.3, 0.6, 0.9, 1.2)
    skews = (0.2, 0.6, 0.95) if quick else (0.2, 0.4, 0.6, 0.8, 0.95)
    for load, skew, adapters in itertools.product(loads, skews, (20,) if quick else (2, 20, 200)):
        rate = load * full_batch_capacity(costs, _PROMPT, _ANSWER, hottest(adapters, skew))
        workload = Hottest(rate=rate, skew=skew, **_RETRIEVAL)
        arrivals = tuple(workload.arrivals(100 if quick else 250, adapters, seed=0))
        yield Cell("retrieval", load, rate, skew, adapters, None, arrivals)


def _video(costs: Costs, quick: bool) -> Iterator[Cell]:
    """Cameras that each send one chunk per period; the period is scaled to the machine's capacity."""
    prompt = Video().frames * Video().frame_tokens
    for load, streams in itertools.product((0.9,) if quick else (0.3, 0.6, 0.9, 1.2), (4,) if quick else (4, 16)):
        for adapters in (2, streams):
            rate = load * full_batch_capacity(costs, prompt, 0, [1 / adapters] * adapters)
            arrivals = tuple(
                arrival._replace(time_s=arrival.time_s * streams / rate)
                for arrival in Video(streams=streams).arrivals(100 if quick else 250, adapters, seed=0)
            )
            yield Cell("video", load, rate, 1 / adapters, adapters, streams, arrivals)


def _row(cell: Cell, costs: Costs, load_s: float) -> dict[str, Any]:
    """Latencies are in ms.

    The row's waits are the longest wait of an admitted request for its next step, under the default policy and under
    the one without a bound. The row's bound is the loosest value of the waiting bound in the latter's replay; that
    policy is a competitor only if it kept the bound.
    """
    policies = (OURS, *(name for name in POLICIES if name != OURS))
    replays = {
        policy: _replay_cached(cell.arrivals, ReplicaConfig(costs=costs, load_s=load_s, policy=policy))
        for policy in policies
    }
    found = {policy: each.latency_ms for policy, each in replays.items()}
    floor_ms = None
    if cell.app == "retrieval":  # video's requests are for heads, which adapters have
        bare = tuple(arrival._replace(adapter=None) for arrival in cell.arrivals)
        floor_ms = _replay_cached(bare, ReplicaConfig(costs=costs, load_s=load_s, policy=BASELINE)).latency_ms
    best = min((policy for policy in found if policy != OURS), key=lambda policy: found[policy])
    unbounded = replays[UNBOUNDED]
    broken = unbounded.longest_wait_s > unbounded.wait_bound_s
    in_bound = min(found[policy] for policy in found if policy != OURS and not (policy == UNBOUNDED and broken))
    return {
        "app": cell.app,
        "load": cell.load,
        "requests/s": cell.rate,
        "skew": cell.skew,
        "adapters": cell.num_adapters,
        "streams": cell.num_streams,
        **found,
        FLOOR: floor_ms,
        "best other": best,
        "ours / best other": found[OURS] / found[best],
        "ours / best in bound": found[OURS] / in_bound,
        "ours waits s": replays[OURS].longest_wait_s,
        f"{UNBOUNDED} waits s": unbounded.longest_wait_s,
        "bound s": unbounded.wait_bound_s,
    }


class _ReplayResult(NamedTuple):
    latency_ms: float
    longest_wait_s: float
    wait_bound_s: float


@functools.lru_cache(maxsize=4 * (len(POLICIES) + 1))
def _replay_cached(arrivals: tuple[Arrival, ...], config: ReplicaConfig) -> _ReplayResult:
    """Cached, because some cells share their traffic: with two adapters the hottest has at least half."""
    found = replay(arrivals, config)
    return _ReplayResult(found.average_token_latency_s * 1e3, found.longest_wait_s, found.wait_bound_s)


def full_batch_capacity(costs: Costs, prompt: int, answer: int, shares: Sequence[float]) -> float:
    """Requests per second of unmerged-only with full batches; prompts run in separate steps."""
    size = EngineConfig.max_batch_size
    different = sum(1 - (1 - share) ** size for share in shares)
    prompts_a_step = max(1.0, EngineConfig.max_step_tokens / prompt)
    prompt_s = costs.merged_s(prompt, 0, 1 / prompts_a_step) + costs.lanes_s(prompt)
    step_s = costs.merged_s(size, size * (prompt + answer / 2)) + costs.lanes_s(size, different)
    return 1 / (prompt_s + answer * step_s / size)


def decision_ms(policy: str, costs: Costs, num_waiting: int = 1000, **settings: Any) -> float:
    """Median CPU milliseconds of admission, adapter loading and the decision."""
    replica = Replica(ReplicaConfig(costs=costs, policy=policy, resident_adapters=100, kv_tokens=10**6, **settings))
    for number in range(num_waiting + EngineConfig.max_batch_size):
        replica.add(str(number), Arrival(0.0, f"adapter-{number % 100}", 192 + number % 128, 10_000))
    spent = []
    for _ in range(60):
        started = time.process_time()
        batch = replica.decide()
        spent.append(time.process_time() - started)
        assert batch is not None, "without load times, some request can always run"
        replica.record(batch)
    return statistics.median(spent[10:]) * 1e3


def _plot(file: str, app: str, x: str, panels: Sequence[str], *middle: str) -> Plot:
    return Plot(
        file=file,
        x=x,
        y=tuple(POLICIES),
        panels=panels,
        where=lambda row: row["app"] == app,
        middle=middle,
        log="xy" if x == "adapters" else "y",
        ylabel="average token latency, ms",
    )


BENCH = Bench(
    name="policy",
    cases=cases,
    measure=measure,
    options=frozenset({"model", "device"}),
    parts=True,
    plots=(
        _plot("load", "retrieval", "load", ("skew",), "adapters"),
        _plot("skew", "retrieval", "skew", ("load",), "adapters"),
        _plot("adapters", "retrieval", "adapters", ("load",), "skew"),
        _plot("video", "video", "load", ("streams", "adapters")),
    ),
)
