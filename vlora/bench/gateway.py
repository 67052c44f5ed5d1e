"""What the front end adds to a text request: over HTTP and RPyC, against the same engine called in this process.

What a client sees of a request, less what the engine alone takes for the same one right before: client and engine alone
in this process, front end and served engine in one each. Request by request in turn, so that both see the same machine,
and without prefix caches, which would make the second that asks the cheaper one. The way in includes JSON, the chat
template, the tokenizer, a second process and text out again.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fusion.embedded import checkpoint_path
from vlora.bench.form import Goal, Report
from vlora.bench.served import Served, served
from vlora.client import Client
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models.processing import InputProcessor
from vlora.types import Request, RequestOutput, SamplingParams

_TOKENS = (1, 16, 64)  # of an answer
_WORDS = ("red", "green", "blue", "yellow", "disc", "board", "octagon", "wedge", "car", "truck", "bus", "bike")
_PROMISE_MS = 3.0
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what decoding half a character gives
_COUNTING = (
    "added = what the client sees less what the engine alone took for the same request right before, pair by pair; "
    "medians and 95th percentiles of these differences. First: until the first text; "
    "of the engine alone, until the step after which that text is certain"
)


class Spent(NamedTuple):
    """Seconds of one request until its first text (None where it comes whole), and until its end."""

    first_s: float | None
    whole_s: float


def run(quick: bool) -> Report:
    """Questions of about 20 tokens to a model of the embedded one's shape in float32, one thread, wall clock.

    quick: 20 requests each way and length instead of 150. On a machine so busy that they take over one minute (of all:
    ten) it is as many as came by then.
    """
    torch.set_num_threads(1)
    rounds, limit_s = (20, 60.0) if quick else (150, 600.0)
    pairs: dict[tuple[int, str], list[tuple[Spent, Spent, float]]] = {}
    local = _Local()
    with served("--no-prefix-cache", "--load-format", "dummy") as server, Client(port=server.rpyc_port) as rpyc:
        web = _Web(server.http_port)
        ways: dict[str, Callable[[str, int], Spent]] = {
            "HTTP": web.ask,
            "HTTP, streamed": web.stream,
            "RPyC": lambda question, tokens: _ask(rpyc, question, tokens),
            "RPyC, streamed": lambda question, tokens: _stream(rpyc, question, tokens),
        }
        ends_s = time.perf_counter() + limit_s
        for turn in range(-3, rounds):  # those before 0 warm up
            for tokens in _TOKENS:
                question = _question(turn)
                request = local.read(question, tokens)
                for way, ask in ways.items():
                    # The engine alone before each way, so that both find the caches as the other one left them.
                    alone = local.ask(request)
                    seen, cpu_s = _with_cpu(server, ask, question, tokens)
                    if turn >= 0:
                        pairs.setdefault((tokens, way), []).append((alone, seen, cpu_s))
            if turn >= 0 and time.perf_counter() > ends_s:
                break
    rows = [_row(way, tokens, found) for (tokens, way), found in pairs.items()]
    goals = [
        Goal(f"{row['way']}, {row['answer tokens']} tokens: {what}", row[f"{what} ms"], _PROMISE_MS, True)
        for row in rows
        for what in ("first adds", "adds")
        if row[f"{what} ms"] is not None
    ]
    machine = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    return Report("gateway", rows, goals, found={"counting": _COUNTING, **machine})


def _row(way: str, tokens: int, pairs: Sequence[tuple[Spent, Spent, float]]) -> dict[str, Any]:
    """pairs: the engine alone, what the client saw, CPU seconds of the front end."""
    firsts = [
        (seen.first_s - alone.first_s) * 1e3
        for alone, seen, _ in pairs
        if seen.first_s is not None and alone.first_s is not None
    ]
    wholes = [(seen.whole_s - alone.whole_s) * 1e3 for alone, seen, _ in pairs]
    return {
        "way": way,
        "answer tokens": tokens,
        "requests": len(pairs),
        "engine ms": statistics.median(alone.whole_s for alone, _, _ in pairs) * 1e3,
        "first adds ms": statistics.median(firsts) if firsts else None,
        "first adds p95 ms": _p95(firsts) if firsts else None,
        "adds ms": statistics.median(wholes),
        "adds p95 ms": _p95(wholes),
        "front end's CPU ms": statistics.fmean(cpu_s for _, _, cpu_s in pairs) * 1e3,
    }


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def _with_cpu(server: Served, ask: Callable[[str, int], Spent], question: str, tokens: int) -> tuple[Spent, float]:
    """And the CPU seconds of the front end meanwhile (in ticks of 10 ms: only their mean says something)."""
    before = server.front_end.cpu_times()
    seen = ask(question, tokens)
    after = server.front_end.cpu_times()
    return seen, after.user + after.system - before.user - before.system


def _question(turn: int) -> str:
    """Another one for each turn, all of one length."""
    digits = [turn // len(_WORDS) ** place % len(_WORDS) for place in range(3)]
    return f"is there a {' or a '.join(_WORDS[digit] for digit in digits)} in this picture"


def _ask(client: Client, question: str, tokens: int) -> Spent:
    started = time.perf_counter()
    client.generate(question, max_tokens=tokens)
    return Spent(None, time.perf_counter() - started)


def _stream(client: Client, question: str, tokens: int) -> Spent:
    started = time.perf_counter()
    arrived = [time.perf_counter() - started for _ in client.stream(question, max_tokens=tokens)]
    return Spent(arrived[0] if arrived else None, time.perf_counter() - started)


class _Local:
    """The engine in this process: token ids in, token ids out."""

    def __init__(self) -> None:
        model = str(checkpoint_path())
        self._processor = InputProcessor.from_pretrained(model)
        # Random weights, which know no end: an answer has as many tokens as it may.
        config = EngineConfig(model=model, load_format="dummy", dtype="float32", threads=1, prefix_cache=False)
        self._engine = LocalEngine(config).engine

    def read(self, question: str, tokens: int) -> Request:
        """What the front end makes of a question."""
        prompt_ids = self._processor.encode(self._processor.chat(question)).prompt_ids
        return Request(request_id="r", prompt_ids=prompt_ids, sampling=SamplingParams(max_tokens=tokens))

    def ask(self, request: Request) -> Spent:
        started = time.perf_counter()
        self._engine.add(request)
        said: list[tuple[float, RequestOutput]] = []
        while self._engine.has_work:
            outputs = self._engine.step()
            said += [(time.perf_counter() - started, output) for output in outputs]
        whole_s, last = said[-1]
        assert last.finish_reason == "length", last
        token_ids: list[int] = []
        for at, output in said:
            token_ids += output.token_ids
            text = self._processor.decode(token_ids)
            if text and not text.endswith(_BROKEN):
                return Spent(at, whole_s)
        return Spent(whole_s, whole_s)  # what was never certain is handed out at the end


class _Web:
    """One kept connection to the HTTP API."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def ask(self, question: str, tokens: int) -> Spent:
        started = time.perf_counter()
        response = self._asked(question, tokens, stream=False)
        json.loads(response.read())
        return Spent(None, time.perf_counter() - started)

    def stream(self, question: str, tokens: int) -> Spent:
        started = time.perf_counter()
        response = self._asked(question, tokens, stream=True)
        lines: list[tuple[float, bytes]] = []
        while line := response.readline():
            if line.startswith(b"data: "):
                lines.append((time.perf_counter() - started, line.removeprefix(b"data: ")))
        whole_s = time.perf_counter() - started
        assert lines.pop()[1] == b"[DONE]\n", lines
        first_s = next((at for at, line in lines if json.loads(line)["choices"][0]["delta"].get("content")), None)
        return Spent(first_s, whole_s)

    def _asked(self, question: str, tokens: int, *, stream: bool) -> http.client.HTTPResponse:
        messages = [{"role": "user", "content": question}]
        body = {"model": "embedded", "messages": messages, "max_tokens": tokens, "stream": stream}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        if response.status != 200:
            raise AssertionError(response.read())
        return response
