"""Hundreds of concurrent clients for minutes: no lost or duplicate data, flat memory, and no slowdown by misbehaving
clients.

Every HTTP stream reports its tokens one by one (`logprobs`) and their count at the end (`usage`): a lost or duplicate
token is detected, as is an answer that differs from the answer to the same question alone. Cameras get exactly one
result for each frame, in order. Slow clients (which stop reading a stream for seconds) and vanishing ones (which
disconnect during an answer) run in alternate phases, and the latency of well-behaved clients is compared between
phases.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import random
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.streams import Trial, observe
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.serve.server_process import HEAD, ServerProcess, embedded_model_server, write_embedded_adapter
from vlora.bench.serve.surfaces import HttpConnection, connected
from vlora.bench.timing import percentile
from vlora.client import AsyncClient

ADAPTERS = ("north", "south", "east", "west")
_NUM_STREAMS = 200
_NUM_CAMERAS = 16
_FPS = 1.0  # of a camera
_ANSWER_TOKENS = 16
_NUM_SLOW = 16
_VANISHING_S = 0.5  # interval between vanishing clients
_NUM_QUESTIONS = 24
_PHASES, _PHASES_QUICK = 6, 2  # misbehaving clients run in every other phase
_WARM_SHARE = 0.25  # of the time; caches fill
_SAMPLE_S = 0.5
_SMALL = 1024  # buffer bytes of a client that does not read
_ANSWER_S = 120.0
_PATH = "/v1/chat/completions"
_FILLING_TOKENS, _LONGEST_PROMPT = 16_000, 200  # numbers of up to five tokens each
# on a machine too busy to be ready by then, measuring starts with the clients ready, and the report shows it
_PREPARING_S = 40.0
_LAST_S = 20.0  # grace period for pending requests after the end; then they are cancelled and counted
_GROWTH_GOAL = 1.02
_COMPANY_GOAL = 1.25
_THINGS = ("red", "green", "blue", "yellow", "purple", "orange", "cyan", "white")
_QUESTIONS = tuple(f"what {what} is {which} ?" for what in ("color", "shape", "thing") for which in _THINGS)
assert len(_QUESTIONS) == _NUM_QUESTIONS
# Small enough to be full before measuring starts.
_FLAGS = ("--max-requests", "512", "--arena-bytes", str(48 * 2**20), "--vision-cache-bytes", str(4 * 2**20))


def measure(quick: bool) -> Measured:
    """200 HTTP streams and 16 video streams on the embedded model in float32, one thread, for five minutes."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for seed, name in enumerate(ADAPTERS):
            write_embedded_adapter(Path(folder) / name, seed)
        with embedded_model_server(Path(folder), *_FLAGS) as server:
            soak = asyncio.run(_run_clients(server, 60.0 if quick else 300.0, _PHASES_QUICK if quick else _PHASES))
    rows: list[dict[str, Any]] = [
        {"what": "HTTP streams", **_times(soak.latencies(bad=None))},
        {"what": "HTTP streams, good company", **_times(soak.latencies(bad=False))},
        {"what": "HTTP streams, bad company", **_times(soak.latencies(bad=True))},
        {"what": "frames", **_times(soak.frame_s)},
    ]
    company = percentile(soak.latencies(bad=True), 99) / percentile(soak.latencies(bad=False), 99)
    growth = {name: soak.growth(name) for name in soak.memory_mib}
    goals = [
        Goal("answers lost, doubled or wrong", float(len(soak.wrong)), 0.0, True),
        *(
            Goal(f"memory of the {name}, end / after warm-up", value, _GROWTH_GOAL, True)
            for name, value in growth.items()
        ),
        Goal("p99 in bad company / in good", company, _COMPANY_GOAL, True),
    ]
    found = {
        "wrong": soak.wrong[:20],
        "memory_mib": {name: [round(value, 1) for _, value in each[::10]] for name, each in soak.memory_mib.items()},
        "vanished": soak.num_vanished,
        "slow": soak.num_slow,
        "dropped frames": soak.num_dropped,
        "cut off at the end": soak.num_cut,
        "questions compared": soak.num_asks,
        "arena filled": soak.filled,
    }
    return Measured(rows, found, goals)


BENCH = Bench(name="soak", measure=measure)


def _times(seconds: list[float]) -> dict[str, Any]:
    median, p99 = (1e3 * percentile(seconds, percent) for percent in (50, 99))
    return {"count": len(seconds), "median ms": median, "p99 ms": p99}


@dataclasses.dataclass
class SoakResult:
    """The results, with times in seconds of the event loop's clock."""

    warm_s: float  # start of measuring; phases of equal length follow
    end_s: float  # end of measuring
    num_phases: int
    answers: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # start and end times
    frame_s: list[float] = dataclasses.field(default_factory=list)  # latencies
    wrong: list[str] = dataclasses.field(default_factory=list)  # descriptions of wrong answers
    memory_mib: dict[str, list[tuple[float, float]]] = dataclasses.field(default_factory=dict)  # by process, with times
    num_vanished: int = 0  # connections that their client closed during an answer
    num_slow: int = 0  # answers that were read slowly
    num_dropped: int = 0  # frames that newer ones replaced
    num_cut: int = 0  # clients cancelled at the deadline
    num_asks: int = 0  # questions with answers to compare
    filled: float = 0.0  # fraction of the preparation's tokens put into the arena

    @property
    def ended(self) -> bool:
        return asyncio.get_running_loop().time() >= self.end_s

    def phase(self, at: float) -> int:
        """The phase at this time, from 0; -1 before the first."""
        return math.floor((at - self.warm_s) / (self.end_s - self.warm_s) * self.num_phases)

    def has_misbehaving_clients(self, at: float) -> bool:
        """Whether slow and vanishing clients run at this time."""
        return at >= self.warm_s and self.phase(at) % 2 == 1

    def latencies(self, *, bad: bool | None) -> list[float]:
        """Seconds of answers since the warm-up; with `bad`, of those within one phase of that kind."""
        return [
            ended - began
            for began, ended in self.answers
            if began >= self.warm_s
            and (bad is None or (self.has_misbehaving_clients(began) is bad and self.phase(began) == self.phase(ended)))
        ]

    def growth(self, name: str) -> float:
        """Memory in the last tenth of the time relative to the first tenth after the warm-up."""
        values = [value for at, value in self.memory_mib[name] if self.warm_s <= at <= self.end_s]
        part = max(1, len(values) // 10)
        return float(np.mean(values[-part:]) / np.mean(values[:part]))


async def _run_clients(server: ServerProcess, seconds: float, num_phases: int) -> SoakResult:
    port = server.http_port
    async with connected(port) as web:
        loop = asyncio.get_running_loop()
        half, ready = loop.time() + _PREPARING_S / 2, loop.time() + _PREPARING_S
        # Each question alone, before other clients start; adapter by adapter, so that each has one if time is short.
        expected: dict[tuple[str, str], str] = {}
        for question, model in itertools.product(_QUESTIONS[::3], ADAPTERS):
            expected[model, question] = await _answer(web, model, question)
            if loop.time() > half:
                break
        # More prompt tokens than the arena's capacity, so that it is full from here on.
        filled = 0
        while filled < _FILLING_TOKENS and loop.time() < ready:
            numbers = range(filled, filled + _LONGEST_PROMPT)
            await _answer(web, ADAPTERS[0], " ".join(f"{number}" for number in numbers))
            filled += _LONGEST_PROMPT
        now = loop.time()
        soak = SoakResult(
            now + _WARM_SHARE * seconds,
            now + seconds,
            num_phases,
            num_asks=len(expected),
            filled=min(1.0, filled / _FILLING_TOKENS),
        )
        async with AsyncClient(port=server.rpyc_port, timeout_s=120.0) as cameras:
            work: list[Coroutine[Any, Any, None]] = [_record_memory(soak, server), _disconnect_early(soak, port)]
            work += [_ask_repeatedly(soak, port, expected, number) for number in range(_NUM_STREAMS)]
            work += [_read_slowly(soak, port) for _ in range(_NUM_SLOW)]
            draws = itertools.count()
            work += [_send_frames(soak, cameras, adapter, draws) for adapter in ADAPTERS]
            await run_until(work, soak.end_s + _LAST_S, soak)
    return soak


async def run_until(work: Sequence[Coroutine[Any, Any, None]], deadline: float, soak: SoakResult) -> None:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.gather(*tasks)
    except TimeoutError:
        soak.num_cut = sum(task.cancelled() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# -- well-behaved clients ---------------------------------------------------------------------------------------------


def _body(model: str, question: str, tokens: int = _ANSWER_TOKENS) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
    }


async def _answer(web: HttpConnection, model: str, question: str) -> str:
    """The text of a complete streamed answer."""
    async with asyncio.timeout(_ANSWER_S):
        return complete_text(*await web.post(_PATH, _body(model, question)))


def complete_text(status: int, body: bytes) -> str:
    """The text of the events of a streamed answer."""
    text, num_tokens, finished, ids = "", 0, 0, set()
    if status != 200:
        raise ValueError(f"status {status}: {body[:200]!r}")
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n") if line]
    if lines[-1:] != ["[DONE]"]:
        raise ValueError(f"the stream ends with {lines[-1:]}")
    *chunks, usage = map(json.loads, lines[:-1])
    if "usage" not in usage:
        raise ValueError(f"the last event has no usage: {usage}")
    if broken := [chunk for chunk in chunks if "choices" not in chunk]:
        raise ValueError(f"unexpected event in the stream: {broken[0]}")
    stopped = False
    for chunk in chunks:
        ids.add(chunk["id"])
        (choice,) = chunk["choices"]
        text += choice["delta"].get("content", "")
        num_tokens += len((choice["logprobs"] or {}).get("content", ()))
        finished += choice["finish_reason"] is not None
        stopped |= choice["finish_reason"] == "stop"
    # The end token is counted, and has no text.
    if num_tokens != usage["usage"]["completion_tokens"] - stopped or finished != 1 or len(ids) != 1:
        raise ValueError(f"received {num_tokens} tokens, {finished} ends, ids {ids}; usage is {usage['usage']}")
    return text


async def _ask_repeatedly(soak: SoakResult, port: int, expected: dict[tuple[str, str], str], number: int) -> None:
    draws = random.Random(number)
    asks = sorted(expected)
    loop = asyncio.get_running_loop()
    while not soak.ended:
        async with connected(port) as web:
            while not soak.ended:
                model, question = draws.choice(asks)
                started = loop.time()
                try:
                    text = await _answer(web, model, question)
                except (ValueError, OSError, EOFError, TimeoutError) as error:
                    soak.wrong.append(f"{model}: {question} {type(error).__name__} {error}")
                    break  # the next one on a new connection
                now = loop.time()
                if text != expected[model, question]:
                    soak.wrong.append(f"{model}: {question} {text!r} instead of {expected[model, question]!r}")
                soak.answers.append((started, now))


async def _send_frames(soak: SoakResult, client: AsyncClient, adapter: str, draws: Iterator[int]) -> None:
    """Cameras until the end; the frames before the warm-up's end are not timed."""
    now = asyncio.get_running_loop().time()
    for seconds, counts in ((soak.warm_s - now, False), (soak.end_s - soak.warm_s, True)):
        trial = Trial(_NUM_CAMERAS // len(ADAPTERS), _FPS, max(1, round(seconds * _FPS)), ((adapter, HEAD),))
        found = await observe(client, trial, draws, patience_s=_LAST_S)
        soak.num_dropped += found.dropped
        soak.frame_s += found.latencies_s if counts else []
        if found.lost or found.failed or found.cut:
            soak.wrong.append(f"cameras of {adapter}: {found.missed(_FPS)}")


# -- misbehaving clients ----------------------------------------------------------------------------------------------


async def _disconnect_early(soak: SoakResult, port: int) -> None:
    """One client after another disconnects at the first bytes of its answer."""

    async def disconnect_once() -> None:
        async with connected(port, limit=_SMALL) as web:
            web.send(_PATH, _body(random.choice(ADAPTERS), _QUESTIONS[0], 400))
            await web.reader.read(200)
        soak.num_vanished += 1

    loop = asyncio.get_running_loop()
    disconnecting: set[asyncio.Task[None]] = set()
    while not soak.ended:
        if soak.has_misbehaving_clients(loop.time()):
            disconnecting.add(task := asyncio.create_task(disconnect_once()))
            task.add_done_callback(disconnecting.discard)
        await asyncio.sleep(_VANISHING_S)
    await asyncio.gather(*disconnecting)


async def _read_slowly(soak: SoakResult, port: int) -> None:
    """Send a request, read one byte per second for a while, and repeat."""
    loop = asyncio.get_running_loop()
    while not soak.ended:
        if not soak.has_misbehaving_clients(loop.time()):
            await asyncio.sleep(_SAMPLE_S)
            continue
        async with connected(port, limit=_SMALL) as web:
            web.send(_PATH, _body(random.choice(ADAPTERS), _QUESTIONS[1], _ANSWER_TOKENS))
            for _ in range(10):
                await web.reader.read(1)
                await asyncio.sleep(1)
        soak.num_slow += 1


async def _record_memory(soak: SoakResult, server: ServerProcess) -> None:
    loop = asyncio.get_running_loop()
    while not soak.ended:
        for name, process in server.processes.items():
            mib = process.memory_info().rss / 2**20
            soak.memory_mib.setdefault(name, []).append((loop.time(), mib))
        await asyncio.sleep(_SAMPLE_S)
