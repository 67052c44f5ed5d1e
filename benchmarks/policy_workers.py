"""Engines that process the same arrivals side by side, each with its own clock.

The engine with the earliest clock runs the next step, so that a temporary slowdown of the machine affects all of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.arrivals import steps
from vlora.bench.dummy import BenchModel, dummy_picture, language_shapes, unseen, write_adapter, write_head
from vlora.bench.timed_engine import TimedEngine
from vlora.bench.timing import work_seconds
from vlora.config import EngineConfig
from vlora.models.loading import dummy_model
from vlora.orchestrator import WaitStats
from vlora.simulator import Arrival
from vlora.simulator.arrivals import adapter_name
from vlora.types import RequestOutput, Timings

NUM_ADAPTERS = 8
_HEAD = "head"
_LABELS = tuple(f"action {number}" for number in range(10))


class WorkClock:
    """One engine's time: seconds of work (`work_seconds`) while it runs, plus skipped idle seconds. A waiting engine
    yields no measurements.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._before_s = self._idle_s = 0.0
        self._since_s: float | None = None

    def __call__(self) -> float:
        return self._before_s if self._since_s is None else self._before_s + self._seconds() - self._since_s

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Time advances within the block."""
        assert self._since_s is None
        self._since_s = self._seconds()
        try:
            yield
        finally:
            self._before_s, self._since_s = self(), None

    def skip_to(self, now_s: float) -> None:
        idle_s = max(0.0, now_s - self())
        self._before_s += idle_s
        self._idle_s += idle_s

    @property
    def busy_s(self) -> float:
        """Seconds of work so far."""
        return self() - self._idle_s


def _adapters(folder: Path, config: Any, shapes: Mapping[str, tuple[int, int]], rank: int) -> dict[str, str]:
    """The adapters' folders, which are written if they are not there."""
    folders = {adapter_name(i): folder / adapter_name(i) for i in range(NUM_ADAPTERS)}
    for seed, path in enumerate(folders.values()):
        if not path.exists():
            write_adapter(path, shapes, rank, seed)
            write_head(path, _HEAD, config.text_config.hidden_size, _LABELS, "action", "what happens ?")
    return {name: str(path) for name, path in folders.items()}


class Worker:
    """An engine over a model with random weights in bfloat16, and its clock."""

    def __init__(
        self, model: BenchModel, rank: int, device: torch.device, policy: str, picture_side: int, folder: Path | None
    ) -> None:
        """Build the engine."""
        self.clock = WorkClock(work_seconds(device))
        self._plain = folder is None
        config = model.config()
        built = dummy_model(config, "bfloat16", device, seed=0)
        settings = EngineConfig(
            model="dummy",
            device=str(device),
            policy=policy,
            arena_bytes=model.arena_bytes,
            merge_fidelity_floor=0.0,
            prefix_cache=False,
            vision_cache_bytes=0,
        )
        adapters = {} if folder is None else _adapters(folder, config, language_shapes(built), rank)
        self._timed = TimedEngine(settings, built, adapters, clock=self.clock)
        self.engine = self._timed.engine
        self._picture = dummy_picture(config, picture_side)

    def add(self, number: int, arrival: Arrival) -> None:
        """Add an arrival. Each of its pictures is new; text fills up the prompt."""
        pictures = [unseen(self._picture) for _ in arrival.images]
        words = max(1, arrival.prompt_tokens - len(pictures) * (1 + self._picture.num_tokens))
        asks_head = not arrival.answer_tokens and not self._plain
        self._timed.add(
            words,
            arrival.answer_tokens or 1,
            None if self._plain else arrival.adapter,
            pictures,
            request_id=str(number),
            head=_HEAD if asks_head else None,
        )

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def step(self) -> tuple[RequestOutput, ...]:
        with self.clock.running():
            return self.engine.step()

    def record_waits(self) -> WaitStats:
        """Record the waits of requests from now on."""
        self.engine.parts.scheduler.waits = waits = WaitStats(self.engine.config.max_batch_size)
        return waits


def capacity(worker: Worker, traffic: Callable[[int], Sequence[Arrival]]) -> float:
    """Requests per second with a full batch: a new request replaces each finished one.

    The first batch is not counted. With more waiting requests, starving ones would alternate and all of them would end
    at about the same time.
    """
    size = worker.engine.config.max_batch_size
    upcoming = enumerate(itertools.cycle(traffic(4 * size)))

    def add_next() -> str:
        number, arrival = next(upcoming)
        worker.add(number, arrival)
        return str(number)

    under_way = {add_next() for _ in range(size)}
    num_ended, before, started = 0, 0, 0.0
    while num_ended < 3 * size:
        for output in worker.step():
            if output.finished:
                timings_of(output)  # checks that it was answered
                under_way.remove(output.request_id)
                under_way.add(add_next())
                num_ended += 1
        if not before and num_ended >= size:
            before, started = num_ended, worker.clock()
    found = (num_ended - before) / (worker.clock() - started)
    for request_id in under_way:
        worker.engine.cancel(request_id)
    return found


class DriveResult(NamedTuple):
    """The results of one worker."""

    finished: Sequence[RequestOutput]  # the last output of each request
    in_bound: bool  # whether no request waited longer than the waiting bound


def drive(workers: Mapping[str, Worker], arrivals: Sequence[Arrival]) -> dict[str, DriveResult]:
    """Run all workers through the same arrivals, the one with the earliest clock first."""
    times = [arrival.time_s for arrival in arrivals]
    waits = {name: worker.record_waits() for name, worker in workers.items()}
    started = {name: worker.clock() for name, worker in workers.items()}
    finished: dict[str, list[RequestOutput]] = {name: [] for name in workers}
    left = {
        name: steps(worker, times, lambda number, worker=worker: worker.add(number, arrivals[number]), worker.clock)  # type: ignore[misc]
        for name, worker in workers.items()
    }
    while left:
        name = min(left, key=lambda name: workers[name].clock() - started[name])
        if (outputs := next(left[name], None)) is None:
            del left[name]
        else:
            finished[name] += [output for output in outputs if output.finished]
    return {name: DriveResult(finished[name], own.longest_s <= own.bound_s) for name, own in waits.items()}


def average_token_latency_ms(outputs: Sequence[RequestOutput]) -> float:
    """The sum of the requests' latencies over the number of all prompt and answer tokens (V-LoRA section 6.1)."""
    timings = [timings_of(output) for output in outputs]
    tokens = sum(each.num_prompt_tokens + each.num_completion_tokens for each in timings)
    return 1e3 * sum(each.latency_s for each in timings) / tokens


def timings_of(output: RequestOutput) -> Timings:
    """The timings of an answered request."""
    assert output.error is None and output.timings is not None, output.error
    return output.timings
