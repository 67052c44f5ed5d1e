"""The simulator's word on `vlora_cost` against the real engine's: the same arrivals through both, at a few points."""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vlora.bench.dummy import language_shapes, write_adapter
from vlora.config import EngineConfig
from vlora.engine import Engine
from vlora.memory.transfer import Inline
from vlora.models.loading import dummy_model
from vlora.orchestrator import Costs
from vlora.simulator import Arrival, Box, replay
from vlora.simulator.arrivals import adapter_name
from vlora.simulator.workloads import Hottest
from vlora.types import Request, RequestOutput, SamplingParams, Timings

OURS, BASELINE = "vlora_cost", "unmerged_only"
LOAD = 0.9  # of the baseline's measured capacity
_NUM_ADAPTERS = 8
_ARENA_BYTES = 2 * 2**30
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
    """The process's own CPU seconds, plus the idle ones that are skipped instead of slept through.

    Other work on the machine should not look like the model's, and nobody learns from an engine that waits.
    """

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._skipped_s

    def skip_to(self, now_s: float) -> None:
        self._skipped_s += max(0.0, now_s - self())


Once = Callable[[str, Callable[[], Any]], Any]


def confirm(
    costs: Costs, config: Any, rank: int, *, skews: Sequence[float], repeats: int, num_requests: int, once: Once
) -> list[Point]:
    """Run both policies on two engines over models of the shapes of `config`, random weights, bfloat16, one thread.

    costs: of the machine that the simulator runs the same arrivals on. Each repeat has arrivals of its own.
    once: a journal's, which may know what was measured before.
    """
    torch.set_num_threads(1)
    engines = _Engines(config, rank)
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
            simulated.append(_simulated(costs, arrivals))
        ratios = tuple(ours / base for ours, base in zip(found[OURS], found[BASELINE], strict=True))
        points.append(Point(skew, rate, tuple(found[BASELINE]), tuple(found[OURS]), ratios, tuple(simulated)))
    return points


def _simulated(costs: Costs, arrivals: Sequence[Arrival]) -> float:
    ours, base = (
        replay(arrivals, Box(costs=costs, policy=policy)).average_token_latency_s for policy in (OURS, BASELINE)
    )
    return ours / base


class _Engines:
    """An engine for each policy, made when the first is asked for."""

    def __init__(self, config: Any, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._clock = WorkClock()

    @functools.cached_property
    def _by_policy(self) -> dict[str, Engine]:
        engines = {policy: _engine(policy, self._config, self._rank, self._clock) for policy in (BASELINE, OURS)}
        for engine in engines.values():  # every adapter is brought, and the cost model learns what a step takes
            drive(engine, self._clock, _arrivals(engine.config.max_batch_size, 1e6, 0.5, seed=0))
        return engines

    def capacity(self, skew: float) -> float:
        """Requests per second of the baseline."""
        return _capacity(self._by_policy[BASELINE], self._clock, skew)

    def latency_ms(self, policy: str, arrivals: Sequence[Arrival]) -> float:
        return average_token_latency_ms(drive(self._by_policy[policy], self._clock, arrivals))


def _engine(policy: str, config: Any, rank: int, clock: WorkClock) -> Engine:
    model = dummy_model(config, "bfloat16", torch.device("cpu"), seed=0)
    settings = EngineConfig(
        model="dummy", policy=policy, arena_bytes=_ARENA_BYTES, merge_fidelity_floor=0.0, prefix_cache=False
    )
    engine = Engine(settings, model=model, clock=clock, executor=Inline())
    shapes = language_shapes(model)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(_NUM_ADAPTERS):
            name = adapter_name(i)
            engine.load_adapter(name, write_adapter(Path(folder) / name, shapes, rank, seed=i))
    return engine


def _arrivals(number: int, rate: float, skew: float, seed: int) -> list[Arrival]:
    return list(Hottest(rate=rate, skew=skew, **_LENGTHS).arrivals(number, _NUM_ADAPTERS, seed))


def _capacity(engine: Engine, clock: WorkClock, skew: float) -> float:
    """Requests per second with more waiting than a batch takes: the first and the last batch of them not counted."""
    size = engine.config.max_batch_size
    started = clock()
    outputs = drive(engine, clock, _arrivals(4 * size, 1e6, skew, seed=0))
    ended = sorted(_timings(output).latency_s for output in outputs)  # all came at once
    assert ended[-1] <= clock() - started
    return (len(ended) - 2 * size) / (ended[-size - 1] - ended[size - 1])


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
            engine.add(
                Request(
                    request_id=str(number),
                    prompt_ids=tuple(itertools.islice(itertools.cycle(range(3, 100)), arrival.prompt_tokens)),
                    adapter=arrival.adapter,
                    sampling=SamplingParams(max_tokens=arrival.answer_tokens, ignore_eos=True),
                )
            )
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
