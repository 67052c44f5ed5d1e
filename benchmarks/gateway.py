"""The latency that the front end adds to a text request: over HTTP and RPyC, against the same engine called in
process.

The added latency is the latency at the client, minus the latency of the same request in the engine's own process
directly before and after (`instrumented_engine.py`). Front end and engine have a process each, and the client runs in
this one. Requests alternate, so that both ways see the same machine, in a random order for each question, and without
prefix caches, which would make the second request cheaper. The path includes JSON, the chat template, the tokenizer, a
second process and detokenization. Parsing in the HTTP client is not included: the time of each part is taken before it
is parsed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import random
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple

from benchmarks.instrumented_engine import DirectRequest, TimedTokens
from fusion.embedded import checkpoint_path
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.serve.server_process import ServerProcess, launched_server
from vlora.bench.serve.surfaces import HttpProtocol
from vlora.client import Client
from vlora.models.processing import InputProcessor
from vlora.simulator.measures import percentile

_TOKENS = (1, 16, 64, 64)  # answer lengths; the longest twice, because its variance is largest
_WORDS = ("red", "green", "blue", "yellow", "disc", "board", "octagon", "wedge", "car", "truck", "bus", "bike")
_GOAL_MS = 3.0
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # the text of an incomplete UTF-8 sequence
_COUNTING = (
    "added = latency at the client, minus the mean latency of the engine alone for the same request directly before "
    "and after; medians of these differences, with their standard error, and 95th percentiles. "
    "First: until the first text; for the engine alone, until the step after which that text is certain. "
    "Engine adds: latency reported by the served engine (in RPyC's answers), minus that of the engine alone"
)


class RequestTimes(NamedTuple):
    """Seconds of one request until its first text (None without streaming), and until its end; `engine_s` by the
    served engine's own clock, if reported.
    """

    first_s: float | None
    whole_s: float
    engine_s: float | None = None


def measure(quick: bool) -> Measured:
    """Questions of about 20 tokens to a model of the embedded model's shape in float32, one thread, wall time.

    Quick: 20 requests per way and length instead of 150 (of 64 tokens: 40 instead of 300), and processes start once
    instead of five times; the standard errors of answers of 64 tokens are 0.4 to 1.7 ms then. On a machine so busy that
    the requests take more than one minute (in the full run: ten), those completed by then count.
    """
    rounds, starts, limit_s = (20, 1, 60.0) if quick else (150, 5, 600.0)
    pairs: dict[tuple[int, str], list[tuple[RequestTimes, RequestTimes, float]]] = {}
    draws = random.Random(0)
    processor = InputProcessor.from_pretrained(str(checkpoint_path()))
    gc.freeze()  # as in the server's processes
    for start in range(starts):
        with (
            tempfile.TemporaryDirectory() as folder,
            launched_server("benchmarks.instrumented_engine", path := f"{folder}/engine") as server,
            contextlib.closing(_DirectEngine(path, processor)) as alone,
            Client(port=server.rpyc_port) as rpyc,
            contextlib.closing(BlockingHttpClient(server.http_port)) as web,
        ):
            turns = range(start, rounds, starts)
            for way, pair in _compare(alone, server, rpyc, web, turns, limit_s / starts, draws):
                pairs.setdefault(way, []).append(pair)
    gc.unfreeze()
    rows = [pair_row(way, tokens, each) for (tokens, way), each in sorted(pairs.items())]
    goals = [
        Goal(f"{row['way']}, {row['answer tokens']} tokens: {what}", row[f"{what} ms"], _GOAL_MS, True)
        for row in rows
        for what in ("first adds", "adds")
        if row[f"{what} ms"] is not None
    ]
    machine = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    return Measured(rows, {"counting": _COUNTING, **machine}, goals)


BENCH = Bench(name="gateway", measure=measure)


def _compare(
    alone: _DirectEngine,
    server: ServerProcess,
    rpyc: Client,
    web: BlockingHttpClient,
    turns: Sequence[int],
    limit_s: float,
    draws: random.Random,
) -> Iterator[tuple[tuple[int, str], tuple[RequestTimes, RequestTimes, float]]]:
    """Number of tokens and way; the latency of the engine alone, the latency at the client, CPU seconds of the front
    end.
    """
    ways: dict[str, Callable[[str, int], RequestTimes]] = {
        "HTTP": web.ask,
        "HTTP, streamed": web.stream,
        "RPyC": lambda question, tokens: _ask_rpyc(rpyc, question, tokens),
        "RPyC, streamed": lambda question, tokens: _stream_rpyc(rpyc, question, tokens),
    }
    ends_s = time.perf_counter() + limit_s
    for turn in (-3, -2, -1, *turns):  # turns below 0 warm up
        for tokens in _TOKENS:
            question = _question(turn)
            # The engine alone runs between all ways, and each measurement directly follows a short answer of its own:
            # otherwise code, weights or a core would be cold after the other way ran.
            alone.ask(question, 1)
            before = alone.ask(question, tokens)
            for way, ask in draws.sample(tuple(ways.items()), len(ways)):
                ask(question, 1)
                seen, cpu_s = _with_cpu_time(server, ask, question, tokens)
                alone.ask(question, 1)
                after = alone.ask(question, tokens)
                if turn >= 0:
                    yield (tokens, way), (_mean(before, after), seen, cpu_s)
                before = after
        if turn >= 0 and time.perf_counter() > ends_s:
            break


def pair_row(way: str, tokens: int, pairs: Sequence[tuple[RequestTimes, RequestTimes, float]]) -> dict[str, Any]:
    firsts = [
        (seen.first_s - alone.first_s) * 1e3
        for alone, seen, _ in pairs
        if seen.first_s is not None and alone.first_s is not None
    ]
    wholes = [(seen.whole_s - alone.whole_s) * 1e3 for alone, seen, _ in pairs]
    engines = [(seen.engine_s - alone.whole_s) * 1e3 for alone, seen, _ in pairs if seen.engine_s is not None]
    return {
        "way": way,
        "answer tokens": tokens,
        "requests": len(pairs),
        "engine ms": statistics.median(alone.whole_s for alone, _, _ in pairs) * 1e3,
        "first adds ms": statistics.median(firsts) if firsts else None,
        "first adds error ms": median_error(firsts) if firsts else None,
        "first adds p95 ms": percentile(firsts, 95) if firsts else None,
        "adds ms": statistics.median(wholes),
        "adds error ms": median_error(wholes),
        "adds p95 ms": percentile(wholes, 95),
        "engine adds ms": statistics.median(engines) if engines else None,
        "front end's CPU ms": statistics.fmean(cpu_s for _, _, cpu_s in pairs) * 1e3,
    }


def _mean(one: RequestTimes, other: RequestTimes) -> RequestTimes:
    """Mean of two answers of the engine alone."""
    assert one.first_s is not None and other.first_s is not None
    return RequestTimes((one.first_s + other.first_s) / 2, (one.whole_s + other.whole_s) / 2)


def median_error(values: Sequence[float]) -> float:
    """The standard error of their median for any distribution, from order statistics."""
    ranked, middle, reach = sorted(values), (len(values) - 1) / 2, math.sqrt(len(values)) / 2
    return (ranked[min(round(middle + reach), len(values) - 1)] - ranked[max(round(middle - reach), 0)]) / 2


def _with_cpu_time(
    server: ServerProcess, ask: Callable[[str, int], RequestTimes], question: str, tokens: int
) -> tuple[RequestTimes, float]:
    """Also the CPU seconds of the front end meanwhile (in ticks of 10 ms: only their mean is meaningful)."""
    before = server.front_end.cpu_times()
    seen = ask(question, tokens)
    after = server.front_end.cpu_times()
    return seen, after.user + after.system - before.user - before.system


def _question(turn: int) -> str:
    """A different question for each turn, all of one length."""
    digits = [turn // len(_WORDS) ** place % len(_WORDS) for place in range(3)]
    return f"is there a {' or a '.join(_WORDS[digit] for digit in digits)} in this picture"


def _ask_rpyc(client: Client, question: str, tokens: int) -> RequestTimes:
    started = time.perf_counter()
    answer = client.generate(question, max_tokens=tokens)
    return RequestTimes(None, time.perf_counter() - started, answer.timings.latency_s)


def _stream_rpyc(client: Client, question: str, tokens: int) -> RequestTimes:
    started = time.perf_counter()
    stream = client.stream(question, max_tokens=tokens)
    arrived = [time.perf_counter() - started for _ in stream]
    whole_s = time.perf_counter() - started
    assert stream.answer is not None
    return RequestTimes(arrived[0] if arrived else None, whole_s, stream.answer.timings.latency_s)


class _DirectEngine:
    """The served engine, called in its own process: token ids in, token ids out."""

    def __init__(self, path: str, processor: InputProcessor) -> None:
        """Connect to the engine."""
        self._engine = connection.Client(path)
        self._processor = processor

    def ask(self, question: str, tokens: int) -> RequestTimes:
        """The latency of an answer there."""
        prompt_ids = self._processor.encode(self._processor.chat(question)).prompt_ids  # as the front end makes them
        self._engine.send(DirectRequest(prompt_ids, tokens))
        timed_tokens: TimedTokens = self._engine.recv()
        whole_s, _ = timed_tokens[-1]
        token_ids: list[int] = []
        for at, new_ids in timed_tokens:
            token_ids += new_ids
            text = self._processor.decode(token_ids)
            if text and not text.endswith(_BROKEN):
                return RequestTimes(at, whole_s)
        return RequestTimes(whole_s, whole_s)  # text that was never certain is emitted at the end

    def close(self) -> None:
        self._engine.close()


class BlockingHttpClient:
    """One persistent connection to the HTTP API, on a blocking socket."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._protocol = HttpProtocol()

    def ask(self, question: str, tokens: int) -> RequestTimes:
        started, arrived = self._exchange(question, tokens, stream=False)
        json.loads(self._protocol.body)
        return RequestTimes(None, arrived[-1][0] - started)

    def stream(self, question: str, tokens: int) -> RequestTimes:
        started, arrived = self._exchange(question, tokens, stream=True)
        assert b"data: [DONE]" in self._protocol.body, self._protocol.body
        events = re.finditer(rb"data: (\{.*\})\n\n", self._protocol.body)
        texts = (each for each in events if json.loads(each[1])["choices"][0]["delta"].get("content"))
        first = next(texts, None)
        first_at = None if first is None else next(at for at, size in arrived if size >= first.end())
        return RequestTimes(None if first_at is None else first_at - started, arrived[-1][0] - started)

    def close(self) -> None:
        self._socket.close()

    def _exchange(self, question: str, tokens: int, *, stream: bool) -> tuple[float, Sequence[tuple[float, int]]]:
        """The time at which the request was sent, and the number of body bytes received by each later time."""
        messages = [{"role": "user", "content": question}]
        body = {"model": "embedded", "messages": messages, "max_tokens": tokens, "stream": stream}
        request = self._protocol.post("/v1/chat/completions", body)
        started = time.perf_counter()
        self._socket.sendall(request)
        arrived: list[tuple[float, int]] = []
        whole = False
        while not whole:
            part = self._socket.recv(65536)
            at = time.perf_counter()
            whole = self._protocol.receive(part)
            arrived.append((at, len(self._protocol.body)))
        if self._protocol.status != 200:
            raise AssertionError(self._protocol.body)
        return started, arrived
