"""The simulator's word on `vlora_cost` against the real engine's: the same arrivals through both, at a few points.

Three engines work through the same arrivals side by side, each by a clock of its own: ours, the baseline, and one whose
requests want no adapter, which no policy can be quicker than. Whichever is furthest behind has the next step, so that a
machine which is slow for a while is slow for all of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vlora.bench.dummy import language_shapes, write_adapter
from vlora.bench.models import Model
from vlora.bench.timing import work_seconds
from vlora.config import EngineConfig
from vlora.engine import Engine
from vlora.memory.transfer import Inline
from vlora.models.loading import dummy_model
from vlora.orchestrator import Costs
from vlora.simulator import Arrival, Box
from vlora.simulator.arrivals import adapter_name
from vlora.simulator.replica import Replica
from vlora.simulator.workloads import Hottest
from vlora.types import Request, RequestOutput, SamplingParams, Timings

OURS, BASELINE = "vlora_cost", "unmerged_only"
_FLOOR = "without adapters"
LOAD = 0.9  # of the baseline's measured capacity
_NUM_ADAPTERS = 8
# A thirteenth of visual retrieval's lengths, prompts and answers in its proportion: so a run of half a minute sees as
# many requests come and go as one of six minutes would.
_LENGTHS = {"prompt_min": 15, "prompt_max": 25, "answer_min": 12, "answer_max": 20}


class Point(NamedTuple):
    """What came of one skewness. Average token latencies in ms, a value for each repeat; the simulated ratios are for
    the same arrivals. floor_ms: without any adapter."""

    skew: float
    requests_s: float
    baseline_ms: tuple[float, ...]
    ours_ms: tuple[float, ...]
    floor_ms: tuple[float, ...]
    simulated: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(ours / base for ours, base in zip(self.ours_ms, self.baseline_ms, strict=True))

    @property
    def floor(self) -> float:
        """The least ratio that any policy could have."""
        return statistics.median(least / base for least, base in zip(self.floor_ms, self.baseline_ms, strict=True))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> float:
        """Between the lowest and the highest ratio of the repeats."""
        return max(self.ratios) - min(self.ratios)

    @property
    def error(self) -> float:
        """How far the simulator's ratio is from the engine's, in the middle."""
        return abs(statistics.median(self.simulated) - self.ratio)


class WorkClock:
    """One engine's time: seconds of work (`work_seconds`) while it runs, plus the idle ones that are skipped instead of
    slept through. Nobody learns from an engine that waits."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._before_s = 0.0
        self._since_s: float | None = None

    def __call__(self) -> float:
        return self._before_s if self._since_s is None else self._before_s + self._seconds() - self._since_s

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Time passes within."""
        assert self._since_s is None
        self._since_s = self._seconds()
        try:
            yield
        finally:
            self._before_s, self._since_s = self(), None

    def skip_to(self, now_s: float) -> None:
        self._before_s += max(0.0, now_s - self())


Once = Callable[[str, Callable[[], Any]], Any]


def confirm(
    costs: Costs,
    model: Model,
    rank: int,
    device: torch.device,
    *,
    skews: Sequence[float],
    repeats: int,
    num_requests: int,
    once: Once,
) -> list[Point]:
    """Run both policies, and no adapters, on engines over a model each, random weights, bfloat16; on a CPU with one
    thread.

    costs: of the machine that the simulator runs the same arrivals on. Each repeat has arrivals of its own.
    once: a journal's, which may know what was measured before.
    """
    torch.set_num_threads(1)
    engines = _Engines(model, rank, device)
    paper = {policy: _Paper(costs, policy) for policy in (BASELINE, OURS)}
    points = []
    for skew in skews:
        # By skewness: requests of one adapter share its reading, so unmerged-only serves more of them.
        rate = LOAD * once(f"capacity, skew {skew}", functools.partial(engines.capacity, skew))
        found = []
        simulated = []
        for seed in range(1, repeats + 1):
            arrivals = _arrivals(num_requests, rate, skew, seed)
            make = functools.partial(engines.latencies_ms, arrivals)
            found.append(once(f"engines, skew {skew}, repeat {seed}", make))
            simulated.append(paper[OURS].latency_ms(arrivals) / paper[BASELINE].latency_ms(arrivals))
        base, ours, floor = (tuple(each[name] for each in found) for name in (BASELINE, OURS, _FLOOR))
        points.append(Point(skew, rate, base, ours, floor, tuple(simulated)))
    return points


class _Paper:
    """An engine's twin in the simulator, with the same past: as warm, and as far with learning what a step takes. Only
    the baseline's capacity is not asked of it."""

    def __init__(self, costs: Costs, policy: str) -> None:
        self._replica = Replica(Box(costs=costs, policy=policy))
        self.latency_ms(_warm_up())

    def latency_ms(self, arrivals: Sequence[Arrival]) -> float:
        replica, started, outputs = self._replica, self._replica.clock.now, list[RequestOutput]()
        for number, arrival in enumerate(arrivals):
            outputs += replica.run_until(started + arrival.time_s)
            replica.wait_until(started + arrival.time_s)
            replica.add(str(number), arrival)
        return average_token_latency_ms([*outputs, *replica.run_until(math.inf)])


class _Worker:
    """An engine and its clock."""

    def __init__(self, model: Model, rank: int, device: torch.device, policy: str, folder: Path | None) -> None:
        """folder: where the adapters are, or are to be written; None for one without any."""
        self.clock = WorkClock(work_seconds(device))
        self._plain = folder is None
        built = dummy_model(model.config(), "bfloat16", device, seed=0)
        settings = EngineConfig(
            model="dummy",
            device=str(device),
            policy=policy,
            arena_bytes=model.arena_bytes,
            merge_fidelity_floor=0.0,
            prefix_cache=False,
        )
        self.engine = Engine(settings, model=built, clock=self.clock, executor=Inline())
        if folder is not None:
            shapes = language_shapes(built)
            for i in range(_NUM_ADAPTERS):
                path = folder / adapter_name(i)
                if not path.exists():
                    write_adapter(path, shapes, rank, seed=i)
                self.engine.load_adapter(adapter_name(i), str(path))

    def add(self, number: int, arrival: Arrival) -> None:
        self.engine.add(_request(number, arrival._replace(adapter=None) if self._plain else arrival))

    def step(self) -> tuple[RequestOutput, ...]:
        with self.clock.running():
            return self.engine.step()


class _Engines:
    """The three, made when one of them is first asked for something."""

    def __init__(self, model: Model, rank: int, device: torch.device) -> None:
        self._model = model
        self._rank = rank
        self._device = device

    @functools.cached_property
    def workers(self) -> dict[str, _Worker]:
        with tempfile.TemporaryDirectory() as found:
            folder = Path(found)
            workers = {
                BASELINE: _Worker(self._model, self._rank, self._device, BASELINE, folder),
                OURS: _Worker(self._model, self._rank, self._device, OURS, folder),
                _FLOOR: _Worker(self._model, self._rank, self._device, BASELINE, None),
            }
        # Every adapter is brought, and the cost model learns what a step takes.
        drive(workers, _warm_up())
        return workers

    def capacity(self, skew: float) -> float:
        """Requests per second of the baseline."""
        return capacity(self.workers[BASELINE], skew)

    def latencies_ms(self, arrivals: Sequence[Arrival]) -> dict[str, float]:
        """Average token latency of each."""
        return {name: average_token_latency_ms(outputs) for name, outputs in drive(self.workers, arrivals).items()}


def _arrivals(number: int, rate: float, skew: float, seed: int) -> list[Arrival]:
    return list(Hottest(rate=rate, skew=skew, **_LENGTHS).arrivals(number, _NUM_ADAPTERS, seed))


def _warm_up() -> list[Arrival]:
    return _arrivals(EngineConfig.max_batch_size, 1e6, 0.5, seed=0)


def capacity(worker: _Worker, skew: float) -> float:
    """Requests per second with every place of the batch taken: where one ends another comes, and the first batch is not
    counted. With more of them waiting, those who starve would take turns and all of them end at about the same time."""
    size = worker.engine.config.max_batch_size
    coming = enumerate(itertools.cycle(_arrivals(4 * size, 1.0, skew, seed=0)))

    def come() -> str:
        number, arrival = next(coming)
        worker.add(number, arrival)
        return str(number)

    under_way = {come() for _ in range(size)}
    num_ended, before, started = 0, 0, 0.0
    while num_ended < 3 * size:
        for output in worker.step():
            if output.finished:
                _timings(output)  # it was answered
                under_way.remove(output.request_id)
                under_way.add(come())
                num_ended += 1
        if not before and num_ended >= size:
            before, started = num_ended, worker.clock()
    found = (num_ended - before) / (worker.clock() - started)
    for request_id in under_way:
        worker.engine.cancel(request_id)
    return found


def _request(number: int, arrival: Arrival) -> Request:
    return Request(
        request_id=str(number),
        prompt_ids=tuple(itertools.islice(itertools.cycle(range(3, 100)), arrival.prompt_tokens)),
        adapter=arrival.adapter,
        sampling=SamplingParams(max_tokens=arrival.answer_tokens, ignore_eos=True),
    )


class _Drive:
    """A worker on its way through arrivals: requests are handed over when they are due, or at the end of the step that
    was under way."""

    def __init__(self, worker: _Worker, arrivals: Iterable[Arrival]) -> None:
        self._worker = worker
        self._started = worker.clock()
        self._waiting = iter(enumerate(arrivals))
        self._following = next(self._waiting, None)
        self.finished: list[RequestOutput] = []  # the last output of each

    @property
    def under_way(self) -> bool:
        return self._following is not None or self._worker.engine.has_work

    @property
    def elapsed_s(self) -> float:
        return self._worker.clock() - self._started

    def step(self) -> None:
        worker = self._worker
        if self._following is not None and not worker.engine.has_work:
            worker.clock.skip_to(self._started + self._following[1].time_s)
        while self._following is not None and self._following[1].time_s <= self.elapsed_s:
            worker.add(*self._following)
            self._following = next(self._waiting, None)
        self.finished += [output for output in worker.step() if output.finished]


def drive(workers: Mapping[str, _Worker], arrivals: Sequence[Arrival]) -> dict[str, list[RequestOutput]]:
    """All through the same arrivals, the one that is furthest behind first; what each answered."""
    drives = {name: _Drive(worker, arrivals) for name, worker in workers.items()}
    while left := [each for each in drives.values() if each.under_way]:
        min(left, key=lambda each: each.elapsed_s).step()
    return {name: each.finished for name, each in drives.items()}


def average_token_latency_ms(outputs: Sequence[RequestOutput]) -> float:
    """The sum of each request's latency over the number of all tokens, prompts' and answers' (V-LoRA section 6.1)."""
    timings = [_timings(output) for output in outputs]
    tokens = sum(each.num_prompt_tokens + each.num_completion_tokens for each in timings)
    return 1e3 * sum(each.latency_s for each in timings) / tokens


def _timings(output: RequestOutput) -> Timings:
    assert output.error is None and output.timings is not None, output.error
    return output.timings
