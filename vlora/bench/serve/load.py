"""The requests of a run; sends them to a server, a fixed number outstanding or at Poisson arrivals; what their clients
observe, and statistics of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vlora.bench.workload import Workload
from vlora.simulator.arrivals import hottest, power_law
from vlora.simulator.measures import percentile

WORDS = (
    *("a", "an", "the", "is", "are", "was", "in", "on", "at", "of", "to", "and", "or", "not", "with", "from", "this"),
    *("that", "it", "there", "what", "which", "where", "when", "how", "many", "picture", "image", "scene", "street"),
    *("house", "tree", "car", "road", "sky", "water", "light", "door", "window", "table", "chair", "person", "child"),
    *("dog", "cat", "bird", "red", "green", "blue", "yellow", "black", "white", "small", "large", "old", "new", "left"),
    *("right", "above", "below", "near", "far", "open", "closed", "first", "last"),
)


class WorkloadRequest(NamedTuple):
    adapter: int | None  # its index, or None for the base model
    text: str  # of the prompt
    pictures: tuple[bytes, ...]  # JPEG files
    answer_tokens: int  # tokens of the answer


def workload_requests(workload: Workload, *, adapted: bool) -> Iterator[WorkloadRequest]:
    """Requests without end, identical for the same workload."""
    sizes: Iterator[tuple[int | None, int, int, int]]  # adapter, pictures, tokens of the prompt and of the answer
    if workload.trace is None:
        fixed = workload.pictures, workload.prompt_tokens, workload.answer_tokens
        sizes = ((adapter, *fixed) for adapter in _adapters(workload))
    else:
        sizes = _sizes(workload)
    for number, (adapter, num_pictures, prompt_tokens, answer_tokens) in enumerate(sizes):
        draws = random.Random(f"{workload.seed} {number}")
        pictures = tuple(_picture(workload, number, place) for place in range(num_pictures))
        text = " ".join(draws.choices(WORDS, k=max(1, workload.num_words(prompt_tokens, num_pictures))))
        yield WorkloadRequest(adapter if adapted else None, text, pictures, answer_tokens)


def _sizes(workload: Workload) -> Iterator[tuple[int | None, int, int, int]]:
    """Of a trace, whose adapters are numbered as they appear."""
    numbers: dict[str | None, int | None] = {None: None}
    for own in workload.traced():
        adapter = numbers.setdefault(own.adapter, (len(numbers) - 1) % workload.adapters)
        yield adapter, len(own.images), own.prompt_tokens, max(1, own.answer_tokens)


def arrivals(workload: Workload) -> Iterator[float]:
    """Due times in seconds from the start: those of the trace, or endless ones of a Poisson process."""
    if workload.trace is not None:
        yield from (arrival.time_s for arrival in workload.traced())
        return
    assert workload.rate is not None
    draws = random.Random(f"{workload.seed} arrivals")
    now = 0.0
    while True:
        now += draws.expovariate(workload.rate)
        yield now


def _adapters(workload: Workload) -> Iterator[int]:
    if workload.popularity == "uniform":
        yield from itertools.cycle(range(workload.adapters))
    count = workload.adapters
    shares = power_law(count, 1.0) if workload.popularity == "zipf" else hottest(count, workload.skew)
    draws = random.Random(f"{workload.seed} adapters")
    while True:
        yield draws.choices(range(count), shares)[0]


def _picture(workload: Workload, number: int, place: int) -> bytes:
    """Smooth random colors: about as many bytes as a photograph; noise would have many times more."""
    from PIL import Image  # workloads without pictures need no Pillow

    draws = np.random.default_rng((workload.seed, number, place))
    coarse = Image.fromarray(draws.integers(0, 255, (16, 16, 3), dtype=np.uint8))
    stream = io.BytesIO()
    size = (workload.picture_width, workload.picture_height)
    coarse.resize(size, Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
    return stream.getvalue()


PERCENTILES = (50, 95, 99)


@dataclasses.dataclass
class ObservedAnswer:
    """One request as observed by its client. Times are seconds of one clock."""

    due_s: float  # when it was due; in a closed loop, when it was sent
    pieces_s: list[float] = dataclasses.field(default_factory=list)  # when each piece of text arrived
    end_s: float = math.nan  # when the answer, or the error, was complete
    text: str = ""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    error: str | None = None  # the cause of an incomplete answer, or None


@dataclasses.dataclass(frozen=True)
class LoadRun:
    answers: Sequence[ObservedAnswer]  # in order of their due times
    started_s: float  # the first request's due time
    ended_s: float  # the last request's end

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s

    @property
    def completed(self) -> list[ObservedAnswer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error is not None]

    @property
    def answer_tokens(self) -> int:
        return sum(answer.answer_tokens for answer in self.completed)

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self.completed)

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens per second."""
        return self.answer_tokens / self.seconds


def latencies(runs: Sequence[LoadRun]) -> dict[str, float | None]:
    """Seconds by name, over the completed requests of all runs.

    TTFT: until the first piece of text. ITL: between two pieces of text of one answer, over all of them. Latency: until
    the end. All are measured from a request's due time.
    """
    done = [answer for run in runs for answer in run.completed]
    first = [answer.pieces_s[0] - answer.due_s for answer in done if answer.pieces_s]
    gaps = [
        later - earlier for answer in done for earlier, later in zip(answer.pieces_s, answer.pieces_s[1:], strict=False)
    ]
    whole = [answer.end_s - answer.due_s for answer in done]
    found: dict[str, float | None] = {}
    for name, seconds in (("TTFT", first), ("ITL", gaps), ("latency", whole)):
        for percent in PERCENTILES:
            found[f"{name} p{percent} s"] = percentile(seconds, percent) if seconds else None
    return found


def row(runs: Sequence[LoadRun], **labels: Any) -> dict[str, Any]:
    """One line of the table over runs of the same requests."""
    seconds = sum(run.seconds for run in runs)
    answers, prompts = (sum(getattr(run, name) for run in runs) for name in ("answer_tokens", "prompt_tokens"))
    return {
        **labels,
        "runs": len(runs),
        "requests": sum(len(run.answers) for run in runs),
        "errors": sum(len(run.errors) for run in runs),
        "answer tokens/s": answers / seconds,
        "all tokens/s": (answers + prompts) / seconds,
        **latencies(runs),
    }


# -- sending -----------------------------------------------------------------------------------------------------------

Send = Callable[[WorkloadRequest, ObservedAnswer], Awaitable[None]]
"""Sends a request and records the observations of its answer. Raises any error."""

_ENDING_S = 600.0
"""Of an open loop: a longer request is an error."""


async def drive(workload: Workload, requests: Iterator[WorkloadRequest], send: Send) -> LoadRun:
    """LoadRun a workload until its last request has ended. A failed request is recorded as an error in the run."""
    if workload.requests is not None:
        requests = iter(list(itertools.islice(requests, workload.requests)))  # created before the clock starts
    if workload.rate is None and workload.trace is None:
        answers = await _closed_loop(workload, requests, send)
    else:
        answers = await _open_loop(workload, requests, send)
    return LoadRun(answers, min(each.due_s for each in answers), max(each.end_s for each in answers))


async def _closed_loop(workload: Workload, requests: Iterator[WorkloadRequest], send: Send) -> list[ObservedAnswer]:
    answers: list[ObservedAnswer] = []
    ends_s = None if workload.duration_s is None else time.perf_counter() + workload.duration_s

    async def one_after_another() -> None:
        while ends_s is None or time.perf_counter() < ends_s:
            request = next(requests, None)
            if request is None:
                return
            answers.append(answer := ObservedAnswer(time.perf_counter()))
            await _attempt(request, answer, send)

    await asyncio.gather(*(one_after_another() for _ in range(workload.concurrency)))
    return answers


async def _open_loop(workload: Workload, requests: Iterator[WorkloadRequest], send: Send) -> list[ObservedAnswer]:
    answers: list[ObservedAnswer] = []
    under_way: list[asyncio.Task[None]] = []
    started_s = time.perf_counter()
    for at_s, request in zip(arrivals(workload), requests, strict=False):
        if workload.duration_s is not None and at_s > workload.duration_s and answers:
            break
        due_s = started_s + at_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        answers.append(answer := ObservedAnswer(due_s))
        under_way.append(asyncio.create_task(_attempt(request, answer, send)))
    await asyncio.gather(*under_way)
    return answers


async def _attempt(request: WorkloadRequest, answer: ObservedAnswer, send: Send) -> None:
    try:
        async with asyncio.timeout(_ENDING_S):
            await send(request, answer)
    except Exception as error:  # any failure is a result of the server
        answer.error = f"{type(error).__name__}: {error}"[:300]
    answer.end_s = time.perf_counter()
