"""Sends a workload's requests to a server: a fixed number outstanding, or at Poisson arrivals."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator

from vlora.bench.serve.measurements import LoadRun, ObservedAnswer
from vlora.bench.serve.workload import Workload, WorkloadRequest, arrivals

Send = Callable[[WorkloadRequest, ObservedAnswer], Awaitable[None]]
"""Sends a request and records the observations of its answer. Raises any error."""

_ENDING_S = 600.0
"""Of an open loop: a longer request is an error."""


async def drive(workload: Workload, requests: Iterator[WorkloadRequest], send: Send) -> LoadRun:
    """LoadRun a workload until its last request has ended. A failed request is recorded as an error in the run."""
    if workload.requests is not None:
        requests = iter(list(itertools.islice(requests, workload.requests)))  # created before the clock starts
    if workload.rate is None:
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
