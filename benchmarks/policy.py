"""Every policy on the engine, with pictures: the same arrivals under each policy, by turns.

All policies use the same operators and the same switch, so they differ only in the order of requests and in the
inference mode. A repeat draws other arrivals; the next one has the policies in the opposite order. A ratio of two
policies is the mean over repeats, with its interval from a bootstrap over them, and a goal holds only if the upper end
does. Simulated grids of policies are figures of `vlora bench paper`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.arrivals import Clock, average_token_latency_ms, serve
from benchmarks.plots import Picture
from vlora.bench.costs import RANK
from vlora.bench.dummy import BenchModel, dummy_picture, model_named
from vlora.bench.harness import Bench, Measured, Store, say
from vlora.bench.report import Goal, Row
from vlora.bench.timed_engine import TimedEngine
from vlora.bench.timing import thread_counts, threads, threads_label, work_seconds
from vlora.config import EngineConfig
from vlora.models.loading import device_of, dummy_model
from vlora.orchestrator.policies.registry import POLICIES
from vlora.orchestrator.stats import WaitStats
from vlora.simulator.arrivals import Arrival, adapter_name
from vlora.simulator.workloads import Hottest, Video
from vlora.types import VisionInput

OURS, BASELINE = "cost_based", "unmerged_only"
FLOOR = "without adapters"
NUM_ADAPTERS = 8
LOAD = 0.9  # of the baseline's measured capacity
SAVES = {0.8: 0.90, 0.95: 0.78}
"""Limits of the default policy's latency relative to the baseline's in retrieval, by the hottest adapter's share."""

_SIDE = 8  # patches per side of a picture: 112 pixels, 16 tokens
_RESAMPLES = 4000


class Traffic(NamedTuple):
    """make: creates arrivals by number, requests per second, and seed. skew: share of the hottest adapter."""

    app: str
    skew: float
    make: Callable[[int, float, int], list[Arrival]]

    def __str__(self) -> str:
        return f"{self.app}, skew {self.skew:g}"


def retrieval(skew: float, picture: VisionInput) -> Traffic:
    """A picture, a few words, and answers of 12 to 20 tokens, a thirteenth of the lengths of V-LoRA section 6.2: a run
    of one minute has as many requests as one of a quarter of an hour at full length.
    """
    prompt = picture.num_tokens + 1
    lengths = {"prompt_min": prompt + 2, "prompt_max": prompt + 8, "answer_min": 12, "answer_max": 20}

    def make(number: int, rate: float, seed: int) -> list[Arrival]:
        hottest = Hottest(rate=rate, skew=skew, images=1, patches=picture.num_patches, **lengths)
        return list(hottest.arrivals(number, NUM_ADAPTERS, seed))

    return Traffic("retrieval", skew, make)


def video(num_adapters: int, picture: VisionInput) -> Traffic:
    """Eight cameras that each send two frames per period, which a task head answers in one pass."""
    tokens, patches = picture.num_tokens + 1, picture.num_patches
    cameras = Video(streams=NUM_ADAPTERS, frames=2, frame_tokens=tokens, patches=patches)

    def make(number: int, rate: float, seed: int) -> list[Arrival]:
        period_s = NUM_ADAPTERS / rate  # of a camera; the workload's own is one second
        return [
            arrival._replace(time_s=arrival.time_s * period_s, prompt_tokens=arrival.prompt_tokens + 1)
            for arrival in cameras.arrivals(number, num_adapters, seed)
        ]

    return Traffic("video", 1 / num_adapters, make)


class PolicyEngine:
    """An engine with random weights under one policy. adapters: False for the base model's work alone."""

    def __init__(self, model: BenchModel, device: torch.device, policy: str, *, adapters: bool = True) -> None:
        config = model.config()
        self._clock = Clock(work_seconds(device))
        self._picture = dummy_picture(config, _SIDE)
        self._adapters = adapters
        self._timed = TimedEngine(
            dummy_model(config, "bfloat16", device, seed=0),
            {adapter_name(number): RANK for number in range(NUM_ADAPTERS)} if adapters else {},
            heads=True,
            parts={"clock": self._clock},
            policy=policy,
            arena_bytes=model.arena_bytes,
        )

    def run(self, arrivals: Sequence[Arrival]) -> tuple[float, float]:
        """Average token latency in ms, and the longest wait of a request relative to the waiting bound."""
        own = arrivals if self._adapters else [arrival._replace(adapter=None) for arrival in arrivals]
        self._timed.engine.parts.scheduler.waits = waits = WaitStats(EngineConfig.max_batch_size)
        timings = serve(self._timed, self._clock, own, self._picture)
        assert len(timings) == len(arrivals)
        return average_token_latency_ms(timings), waits.longest_s / waits.bound_s

    def capacity(self, traffic: Traffic) -> float:
        """Requests per second of full batches, after one that loads every adapter and trains the cost model."""
        size = EngineConfig.max_batch_size
        self.run(traffic.make(size, 1e6, 0))
        began_s = self._clock()
        self.run(traffic.make(4 * size, 1e6, 1))
        return 4 * size / (self._clock() - began_s)


class Point(NamedTuple):
    """The results of one kind of traffic.

    Attributes:
        requests_s: Arrivals per second.
        latency_ms: Average token latency by policy, a value for each repeat.
        waits: The longest wait by policy, relative to the waiting bound.
    """

    traffic: Traffic
    threads: int
    requests_s: float
    latency_ms: Mapping[str, Sequence[float]]
    waits: Mapping[str, float]

    def ratio(self, other: str, one: str = OURS) -> tuple[float, float, float]:
        """One policy's latency relative to another's: the geometric mean, and its 95 % interval."""
        logs = np.log(np.array(self.latency_ms[one]) / np.array(self.latency_ms[other]))
        means = np.random.default_rng(0).choice(logs, (_RESAMPLES, len(logs))).mean(1)
        mean, low, high = np.exp([logs.mean(), *np.quantile(means, (0.025, 0.975))]).tolist()
        return mean, low, high

    @property
    def best(self) -> str:
        """The best other policy that kept the waiting bound."""
        kept = [name for name in self.latency_ms if name not in (OURS, FLOOR) and self.waits[name] <= 1]
        return min(kept or [BASELINE], key=lambda name: statistics.mean(self.latency_ms[name]))

    def row(self) -> Row:
        return {
            "traffic": str(self.traffic),
            "threads": self.threads,
            "requests/s": self.requests_s,
            **{name: statistics.mean(found) for name, found in self.latency_ms.items()},
            f"{OURS} / {BASELINE}": _shown(self.ratio(BASELINE)),
            "floor": self.ratio(BASELINE, FLOOR)[0],
            "best other": self.best,
            f"{OURS} / best": _shown(self.ratio(self.best)),
            "broke the bound": ", ".join(name for name, wait in self.waits.items() if wait > 1 and name != FLOOR),
        }

    def goals(self) -> Iterator[Goal]:
        where = f"{self.traffic} at {LOAD:g} of capacity, {threads_label(self.threads)}"
        yield Goal(f"{OURS} / {self.best}, the best other, {where}, upper end", self.ratio(self.best)[2], 1.01, True)
        if self.traffic.app == "retrieval" and self.traffic.skew in SAVES:
            name = f"{OURS} / {BASELINE}, {where}, upper end; {FLOOR} {self.ratio(BASELINE, FLOOR)[0]:.3f}"
            yield Goal(name, self.ratio(BASELINE)[2], SAVES[self.traffic.skew], True)


def _shown(ratio: tuple[float, float, float]) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*ratio)


def measure_point(
    engines: Mapping[str, PolicyEngine], traffic: Traffic, repeats: int, num_requests: int, store: Store
) -> Point:
    number = torch.get_num_threads()
    where = f"{traffic}, {threads_label(number)}"
    rate = LOAD * store.value(f"capacity, {where}", functools.partial(engines[BASELINE].capacity, traffic))
    latency_ms: dict[str, list[float]] = {name: [] for name in engines}
    waits = dict.fromkeys(engines, 0.0)
    for seed in range(1, repeats + 1):
        arrivals = traffic.make(num_requests, rate, seed)
        for name in list(engines)[:: 1 if seed % 2 else -1]:
            run = functools.partial(engines[name].run, arrivals)
            found_ms, wait = store.value(f"{name}, {where}, repeat {seed}", run)
            latency_ms[name].append(found_ms)
            waits[name] = max(waits[name], wait)
        say(f"{where}: repeat {seed} of {repeats}")
    return Point(traffic, number, rate, latency_ms, waits)


def cases(quick: bool, model: str = "qwen2-0.5b", device: str = "cpu") -> dict[str, tuple[bool, str, str]]:
    return {f"{model}, {device}": (quick, model, device)}


def measure(case: tuple[bool, str, str], store: Store) -> Measured:
    """Run all policies on a server's default number of threads and on one. Quick: two kinds of traffic, two repeats."""
    quick, name, device = case
    model, on = model_named(name), device_of(EngineConfig(model=name, device=device), 0)
    picture = dummy_picture(model.config(), _SIDE)
    skews, shared = ((0.8,), (2,)) if quick else ((0.3, 0.6, *SAVES), (2, NUM_ADAPTERS))
    traffics = [*(retrieval(skew, picture) for skew in skews), *(video(number, picture) for number in shared)]
    points = []
    for number in thread_counts() if on.type == "cpu" else [1]:
        with threads(number):
            engines = {policy: PolicyEngine(model, on, policy) for policy in POLICIES}
            engines[FLOOR] = PolicyEngine(model, on, BASELINE, adapters=False)
            for engine in engines.values():
                engine.run(traffics[0].make(EngineConfig.max_batch_size, 1e6, 0))
            repeats, num_requests = (2, 12) if quick else (6, 40)
            points += [measure_point(engines, each, repeats, num_requests, store) for each in traffics]
    return Measured([point.row() for point in points], goals=[goal for point in points for goal in point.goals()])


def pictures(rows: Sequence[Row]) -> dict[str, Picture]:
    bars: dict[str, Any] = {
        "kind": "bars",
        "each": ["threads"],
        "title": "threads: {threads}",
        "x": "traffic",
        "series": [{"y": name, "name": name} for name in (*POLICIES, FLOOR)],
        "settings": {"ylabel": "average token latency, ms"},
    }
    return {"latency": Picture(rows, [bars])}


BENCH = Bench(
    name="policy",
    cases=cases,
    measure=measure,
    options=frozenset({"model", "device"}),
    parts=True,
    pictures=pictures,
)
