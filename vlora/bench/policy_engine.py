"""The simulator's word on `vlora_cost` against the real engine's: the same arrivals through both, at a few points."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
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
LOAD = 0.9  # of the baseline's measured capacity
_NUM_ADAPTERS = 8
# A thirteenth of visual retrieval's lengths, prompts and answers in its proportion: so a run of half a minute sees as
# many requests come and go as one of six minutes would.
_LENGTHS = {"prompt_min": 15, "prompt_max": 25, "answer_min": 12, "answer_max": 20}


class Point(NamedTuple):
    """What came of one skewness. Average token latencies in ms and their ratios, a value for each repeat; the simulated
    ratios are for the same arrivals."""

    skew: float
    requests_s: float
    baseline_ms: tuple[float, ...]
    ours_ms: tuple[float, ...]
    ratios: tuple[float, ...]
    simulated: tuple[float, ...]

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
    """Seconds of work (`work_seconds`), plus the idle ones that are skipped instead of slept through.

    Nobody learns from an engine that waits.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return self._seconds() + self._skipped_s

    def skip_to(self, now_s: float) -> None:
        self._skipped_s += max(0.0, now_s - self())


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
    """Run both policies on two engines over a model each, random weights, bfloat16; on a CPU with one thread.

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
        found: dict[str, list[float]] = {BASELINE: [], OURS: []}
        simulated = []
        for seed in range(1, repeats + 1):
            arrivals = _arrivals(num_requests, rate, skew, seed)
            for policy, latencies in found.items():
                make = functools.partial(engines.latency_ms, policy, arrivals)
                latencies.append(once(f"engine, skew {skew}, repeat {seed}, {policy}", make))
            simulated.append(paper[OURS].latency_ms(arrivals) / paper[BASELINE].latency_ms(arrivals))
        ratios = tuple(ours / base for ours, base in zip(found[OURS], found[BASELINE], strict=True))
        points.append(Point(skew, rate, tuple(found[BASELINE]), tuple(found[OURS]), ratios, tuple(simulated)))
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


class _Engines:
    """An engine for each policy, made when the first is asked for."""

    def __init__(self, model: Model, rank: int, device: torch.device) -> None:
        self._model = model
        self._rank = rank
        self._device = device
        self._clock = WorkClock(work_seconds(device))

    @functools.cached_property
    def _by_policy(self) -> dict[str, Engine]:
        with tempfile.TemporaryDirectory() as folder:
            engines = {policy: self._engine(policy, Path(folder)) for policy in (BASELINE, OURS)}
        for engine in engines.values():  # every adapter is brought, and the cost model learns what a step takes
            drive(engine, self._clock, _warm_up())
        return engines

    def _engine(self, policy: str, folder: Path) -> Engine:
        """folder: where the adapters are, or are to be written."""
        model = dummy_model(self._model.config(), "bfloat16", self._device, seed=0)
        settings = EngineConfig(
            model="dummy",
            device=str(self._device),
            policy=policy,
            arena_bytes=self._model.arena_bytes,
            merge_fidelity_floor=0.0,
            prefix_cache=False,
        )
        engine = Engine(settings, model=model, clock=self._clock, executor=Inline())
        shapes = language_shapes(model)
        for i in range(_NUM_ADAPTERS):
            path = folder / adapter_name(i)
            if not path.exists():
                write_adapter(path, shapes, self._rank, seed=i)
            engine.load_adapter(adapter_name(i), str(path))
        return engine

    def capacity(self, skew: float) -> float:
        """Requests per second of the baseline."""
        return capacity(self._by_policy[BASELINE], self._clock, skew)

    def latency_ms(self, policy: str, arrivals: Sequence[Arrival]) -> float:
        return average_token_latency_ms(drive(self._by_policy[policy], self._clock, arrivals))


def _arrivals(number: int, rate: float, skew: float, seed: int) -> list[Arrival]:
    return list(Hottest(rate=rate, skew=skew, **_LENGTHS).arrivals(number, _NUM_ADAPTERS, seed))


def _warm_up() -> list[Arrival]:
    return _arrivals(EngineConfig.max_batch_size, 1e6, 0.5, seed=0)


def capacity(engine: Engine, clock: Callable[[], float], skew: float) -> float:
    """Requests per second with every place of the batch taken: where one ends another comes, and the first batch is not
    counted. With more of them waiting, those who starve would take turns and all of them end at about the same time."""
    size = engine.config.max_batch_size
    coming = enumerate(itertools.cycle(_arrivals(4 * size, 1.0, skew, seed=0)))

    def come() -> str:
        number, arrival = next(coming)
        engine.add(_request(number, arrival))
        return str(number)

    under_way = {come() for _ in range(size)}
    num_ended, before, started = 0, 0, 0.0
    while num_ended < 3 * size:
        for output in engine.step():
            if output.finished:
                _timings(output)  # it was answered
                under_way.remove(output.request_id)
                under_way.add(come())
                num_ended += 1
        if not before and num_ended >= size:
            before, started = num_ended, clock()
    found = (num_ended - before) / (clock() - started)
    for request_id in under_way:
        engine.cancel(request_id)
    return found


def _request(number: int, arrival: Arrival) -> Request:
    return Request(
        request_id=str(number),
        prompt_ids=tuple(itertools.islice(itertools.cycle(range(3, 100)), arrival.prompt_tokens)),
        adapter=arrival.adapter,
        sampling=SamplingParams(max_tokens=arrival.answer_tokens, ignore_eos=True),
    )


def drive(engine: Engine, clock: WorkClock, arrivals: Iterable[Arrival]) -> list[RequestOutput]:
    """Hand requests over when they are due, or at the end of the step that was under way; the last output of each."""
    started = clock()
    waiting = iter(enumerate(arrivals))
    following = next(waiting, None)
    finished: list[RequestOutput] = []
    while following is not None or engine.has_work:
        if following is not None and not engine.has_work:
            clock.skip_to(started + following[1].time_s)
        while following is not None and started + following[1].time_s <= clock():
            number, arrival = following
            engine.add(_request(number, arrival))
            following = next(waiting, None)
        finished += [output for output in engine.step() if output.finished]
    return finished


def average_token_latency_ms(outputs: Sequence[RequestOutput]) -> float:
    """The sum of each request's latency over the number of all tokens, prompts' and answers' (V-LoRA section 6.1)."""
    timings = [_timings(output) for output in outputs]
    tokens = sum(each.num_prompt_tokens + each.num_completion_tokens for each in timings)
    return 1e3 * sum(each.latency_s for each in timings) / tokens


def _timings(output: RequestOutput) -> Timings:
    assert output.error is None and output.timings is not None, output.error
    return output.timings
