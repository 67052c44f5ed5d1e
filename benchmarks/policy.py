"""Every policy on the engine, with pictures: the same arrivals under each policy, and in the simulator.

The machine is this one: the cost model is fitted to the real engine's steps at the start of the run. All policies use
the same operators and the same switch, so they differ only in the order of requests and in the inference mode. They run
with a server's default number of threads and with one; the simulator's prediction must be within the spread of repeats.
Simulated grids of policies are figures of `vlora bench paper`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.policy_workers import NUM_ADAPTERS, Worker, average_token_latency_ms, capacity, drive
from vlora.bench.costs import RANK, costs_as_dict, measure_costs
from vlora.bench.dummy import BenchModel, dummy_picture, model_named
from vlora.bench.harness import Bench, Measured, Once, Store
from vlora.bench.plots import Plot
from vlora.bench.report import Goal
from vlora.bench.timing import thread_counts, threads, threads_label
from vlora.config import EngineConfig
from vlora.models.loading import device_of
from vlora.orchestrator import POLICIES, Costs
from vlora.simulator import Arrival, ReplicaConfig
from vlora.simulator.replica import Replica
from vlora.simulator.workloads import Hottest, Video
from vlora.types import RequestOutput, VisionInput

OURS, BASELINE = "cost_based", "unmerged_only"
FLOOR = "without adapters"
LOAD = 0.9  # of the baseline's measured capacity
SKEWS = (0.6, 0.8, 0.95)  # the hottest adapter's share of retrieval
_LEAST_SPREAD = 0.02  # two or three repeats are often closer to each other than to a fourth
_VIDEO_ADAPTERS = (2, NUM_ADAPTERS)
_SIDE = 8  # patches per side of a picture: 112 pixels, 16 tokens
_FRAMES = 2


def cases(quick: bool, model: str = "qwen2-0.5b", device: str = "cpu") -> dict[str, tuple[bool, str, str]]:
    return {f"{model}, {device}": (quick, model, device)}


def measure(case: tuple[bool, str, str], store: Store) -> Measured:
    """Fit this machine's costs, then run all policies. Quick: one skew of retrieval, fewer requests and repeats."""
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
    goals = [
        Goal(f"a decision with 1,000 waiting, {policy}, ms", decision_ms(policy, _costs(fits[0])), 2.0, True)
        for policy in POLICIES
    ]
    goals += itertools.chain.from_iterable(point.goals(saves=not quick) for point in points)
    return Measured([point.row() for point in points], fits[0], goals)


def _costs(found: Mapping[str, Any]) -> Costs:
    return Costs(**{name: found["costs"][name] for name in Costs._fields})


BENCH = Bench(
    name="policy",
    cases=cases,
    measure=measure,
    options=frozenset({"model", "device"}),
    parts=True,
    plots=(
        Plot(
            file="latency",
            kind="bars",
            x="traffic",
            y=(*POLICIES, FLOOR),
            panels=("threads",),
            ylabel="average token latency, ms",
        ),
    ),
)


def decision_ms(policy: str, costs: Costs, num_waiting: int = 1000) -> float:
    """Median CPU milliseconds of admission, adapter loading and the decision."""
    replica = Replica(ReplicaConfig(costs=costs, policy=policy, resident_adapters=100, kv_tokens=10**6))
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


class Traffic(NamedTuple):
    """One kind of traffic."""

    app: str  # its application
    skew: float  # share of the hottest adapter
    make: Callable[[int, float, int], list[Arrival]]  # creates arrivals by number, requests per second, and seed

    def __str__(self) -> str:
        return f"{self.app}, skew {self.skew:g}"


def retrieval(skew: float, picture: VisionInput) -> Traffic:
    """A picture, a few words, and answers of 12 to 20 tokens.

    A thirteenth of visual retrieval's lengths (V-LoRA section 6.2), so that a run of one minute handles as many
    requests as one of a quarter of an hour at full length.
    """
    prompt = picture.num_tokens + 1

    def make(number: int, rate: float, seed: int) -> list[Arrival]:
        lengths = {"prompt_min": prompt + 2, "prompt_max": prompt + 8, "answer_min": 12, "answer_max": 20}
        hottest = Hottest(rate=rate, skew=skew, images=1, patches=picture.num_patches, **lengths)
        return list(hottest.arrivals(number, NUM_ADAPTERS, seed))

    return Traffic("retrieval", skew, make)


def video(num_adapters: int, picture: VisionInput) -> Traffic:
    """Eight cameras that each send two frames per period, which a task head answers in one pass."""

    def make(number: int, rate: float, seed: int) -> list[Arrival]:
        tokens, patches = picture.num_tokens + 1, picture.num_patches
        cameras = Video(streams=NUM_ADAPTERS, frames=_FRAMES, frame_tokens=tokens, patches=patches)
        period_s = NUM_ADAPTERS / rate  # of a camera; the workload's own is one second
        return [
            arrival._replace(time_s=arrival.time_s * period_s, prompt_tokens=arrival.prompt_tokens + 1)
            for arrival in cameras.arrivals(number, num_adapters, seed)
        ]

    return Traffic("video", 1 / num_adapters, make)


class EnginePoint(NamedTuple):
    """The results of one kind of traffic at a number of threads."""

    app: str  # the application
    skew: float  # share of the hottest adapter
    threads: int  # of the engine
    requests_s: float  # requests per second
    latency_ms: Mapping[str, Sequence[float]]  # average token latency by policy, a value for each repeat
    simulated: Sequence[float]  # the default policy's latency relative to the baseline's for the same arrivals
    broke: Sequence[str]  # policies under which a request waited longer than the waiting bound

    def ratios(self, other: str = BASELINE) -> list[float]:
        """The default policy's latency relative to another's, for each repeat."""
        return [ours / its for ours, its in zip(self.latency_ms[OURS], self.latency_ms[other], strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios())

    @property
    def floor(self) -> float:
        """A lower bound on the ratio to the baseline for any policy: the run without adapters."""
        pairs = zip(self.latency_ms[FLOOR], self.latency_ms[BASELINE], strict=True)
        return statistics.median(least / base for least, base in pairs)

    @property
    def best(self) -> str:
        """The best other policy that kept the waiting bound."""
        others = [name for name in self.latency_ms if name not in (OURS, FLOOR, *self.broke)]
        return min(others or [BASELINE], key=lambda name: statistics.median(self.latency_ms[name]))

    @property
    def error(self) -> float:
        """Difference of the simulator's and the engine's ratio, in the median."""
        return abs(statistics.median(self.simulated) - self.ratio)

    def row(self) -> dict[str, Any]:
        """Latencies are medians in ms."""
        return {
            "traffic": f"{self.app}, skew {self.skew:g}",
            "threads": self.threads,
            "requests/s": self.requests_s,
            **{name: statistics.median(found) for name, found in self.latency_ms.items()},
            f"{OURS} / {BASELINE}": self.ratio,
            "floor": self.floor,
            "simulated": statistics.median(self.simulated),
            "best other": self.best,
            "repeats": self.ratios(),
            "broke the bound": ", ".join(self.broke),
        }

    def goals(self, *, saves: bool) -> Iterator[Goal]:
        """With all policies measured: the default policy's latency relative to the baseline and to the best other
        policy, and the simulator's error.
        """
        where = f"engine at {LOAD:g} of capacity, {self.app}, skew {self.skew:g}, {threads_label(self.threads)}"
        if self.app == "retrieval" and saves:
            ratios = f"median of {_joined(self.ratios())}; {FLOOR} {self.floor:.3f}"
            yield Goal(f"{OURS} / {BASELINE}, {where}, {ratios}", self.ratio, most(self.skew, self.floor), True)
        to_best = self.ratios(self.best)
        name = f"{OURS} / {self.best}, the best other in bound, {where}, median of {_joined(to_best)}"
        yield Goal(name, statistics.median(to_best), 1.0 + spread(to_best), True)
        name = f"simulated ({_joined(self.simulated)}) against measured, {where}; spread of repeats"
        yield Goal(name, self.error, spread(self.ratios()), True)


def most(skew: float, floor: float) -> float:
    """The limit for a policy's latency relative to the baseline's: half of what merging the hottest adapter can save.

    Of a batch's time, 1 - floor is spent on adapters. Requests of the merged one save their part of it, and each other
    request pays it twice: for its own adapter, and for taking the merged one back.
    """
    return 1 - (2 * skew - 1) * (1 - floor) / 2


def spread(ratios: Sequence[float]) -> float:
    """Difference of the highest and the lowest repeat, at least that of a usual machine."""
    return max(_LEAST_SPREAD, max(ratios) - min(ratios))


def _joined(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.3f}" for ratio in ratios)


def measure_policies(
    costs: Costs,
    model: BenchModel,
    rank: int,
    device: torch.device,
    *,
    skews: Sequence[float],
    repeats: int,
    num_requests: int,
    once: Once,
) -> list[EnginePoint]:
    """Run every policy, and the model without adapters, on separate engines with random weights in bfloat16, on
    torch's threads.
    """
    picture = dummy_picture(model.config(), _SIDE)
    traffics = [*(retrieval(skew, picture) for skew in skews), *(video(number, picture) for number in _VIDEO_ADAPTERS)]
    engines = PolicyEngines(model, rank, device, retrieval(0.5, picture))
    points = [_point(costs, engines, traffic, repeats, num_requests, once) for traffic in traffics]
    del engines
    gc.collect()  # engines are in reference cycles, and memory has no room for the next set beside this one
    return points


def _point(
    costs: Costs, engines: PolicyEngines, traffic: Traffic, repeats: int, num_requests: int, once: Once
) -> EnginePoint:
    num_threads = torch.get_num_threads()
    where = f"{traffic}, {threads_label(num_threads)}"
    # By skewness: requests of one adapter share reading its weights, so unmerged-only serves more of them.
    rate = LOAD * once(f"capacity, {where}", functools.partial(engines.capacity, traffic))
    counterparts = {policy: SimulatedEngine(costs, policy, engines.warm_up()) for policy in (BASELINE, OURS)}
    latency_ms: dict[str, list[float]] = {}
    simulated: list[float] = []
    broke: set[str] = set()
    for seed in range(1, repeats + 1):
        arrivals = traffic.make(num_requests, rate, seed)
        found = once(f"engines, {where}, repeat {seed}", functools.partial(engines.measure, arrivals))
        for name, (its_ms, in_bound) in found.items():
            latency_ms.setdefault(name, []).append(its_ms)
            if not in_bound:
                broke.add(name)
        simulated.append(counterparts[OURS].latency_ms(arrivals) / counterparts[BASELINE].latency_ms(arrivals))
    return EnginePoint(traffic.app, traffic.skew, num_threads, rate, latency_ms, simulated, sorted(broke - {FLOOR}))


class SimulatedEngine:
    """Simulated counterpart of an engine with the same history: equally warm, with an equally trained cost model. It
    does not measure the baseline's capacity.
    """

    def __init__(self, costs: Costs, policy: str, warm_up: Sequence[Arrival]) -> None:
        self._replica = Replica(ReplicaConfig(costs=costs, policy=policy))
        self.latency_ms(warm_up)

    @property
    def learned_costs(self) -> Costs:
        """The costs that the scheduler learned from the replays."""
        return self._replica.scheduler.costs

    def latency_ms(self, arrivals: Sequence[Arrival]) -> float:
        replica, started, outputs = self._replica, self._replica.clock.now, list[RequestOutput]()
        for number, arrival in enumerate(arrivals):
            outputs += replica.run_until(started + arrival.time_s)
            replica.wait_until(started + arrival.time_s)
            replica.add(str(number), arrival)
        return average_token_latency_ms([*outputs, *replica.run_until(math.inf)])


class PolicyEngines:
    """One engine for each policy that the model's memory allows, and one without adapters; created on first use."""

    def __init__(self, model: BenchModel, rank: int, device: torch.device, first: Traffic) -> None:
        """Build no engine yet."""
        self._model = model
        self._rank = rank
        self._device = device
        self._first = first

    def warm_up(self) -> list[Arrival]:
        """A batch of simultaneous requests that loads every adapter and trains the cost models."""
        return self._first.make(EngineConfig.max_batch_size, 1e6, 0)

    @functools.cached_property
    def workers(self) -> dict[str, Worker]:
        policies = list(POLICIES) if self._model.all_policies else [BASELINE, OURS]
        with tempfile.TemporaryDirectory() as found:
            folder = Path(found)
            make = functools.partial(Worker, self._model, self._rank, self._device, picture_side=_SIDE)
            workers = {policy: make(policy=policy, folder=folder) for policy in policies}
            workers[FLOOR] = make(policy=BASELINE, folder=None)
        drive(workers, self.warm_up())
        return workers

    def capacity(self, traffic: Traffic) -> float:
        """Requests per second of the baseline."""
        return capacity(self.workers[BASELINE], lambda number: traffic.make(number, 1.0, 0))

    def measure(self, arrivals: Sequence[Arrival]) -> dict[str, tuple[float, bool]]:
        """Average token latency in ms of each engine, and whether it kept the waiting bound."""
        found = drive(self.workers, arrivals)
        return {name: (average_token_latency_ms(each.finished), each.in_bound) for name, each in found.items()}
