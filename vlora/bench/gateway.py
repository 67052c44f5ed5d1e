"""What the front end adds to a text request: over HTTP and RPyC, against the same engine called in this process.

Request by request in turn, so that both ways see the same machine, and without prefix caches, which would make the
second way that asks the cheaper one. The way in includes JSON, the chat template, the tokenizer, a second process and
text out again; token by token, since answers may be streamed or stopped at any of them.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fusion.embedded import checkpoint_path
from vlora.bench.form import Goal, Report
from vlora.bench.served import Served, served
from vlora.client import Client
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models.processing import InputProcessor
from vlora.types import Request, SamplingParams

_TOKENS = (1, 16)  # of an answer
_WORDS = ("red", "green", "blue", "yellow", "disc", "board", "octagon", "wedge", "car", "truck", "bus", "bike")
_PROMISE_MS = 3.0


def run(quick: bool) -> Report:
    """Questions of about 20 tokens to a model of the embedded one's shape in float32, one thread, wall clock.

    quick: 30 requests each way instead of 200.
    """
    torch.set_num_threads(1)
    rounds = 30 if quick else 200
    spent: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    local = _Local()
    with served("--no-prefix-cache", "--load-format", "dummy") as server, Client(port=server.rpyc_port) as rpyc:
        web = _Web(server.http_port)
        ways: dict[str, Callable[[str, int], object]] = {
            "HTTP": web.ask,
            "HTTP, streamed": web.stream,
            "RPyC": lambda question, tokens: rpyc.generate(question, max_tokens=tokens),
        }
        for turn in range(-3, rounds):  # those before 0 warm up
            for tokens in _TOKENS:
                question = _question(turn)
                request = local.read(question, tokens)
                for way, ask in ways.items():
                    # The engine alone before each way, so that both find the caches as the other one left them.
                    alone_s, _ = _timed(server, local.ask, request)
                    whole_s, cpu_s = _timed(server, ask, question, tokens)
                    if turn >= 0:
                        spent.setdefault((way, tokens), []).append((alone_s, whole_s, cpu_s))
    rows: list[dict[str, Any]] = []
    for (way, tokens), times in sorted(spent.items(), key=lambda item: item[0][1]):
        rows.append(
            {
                "way": way,
                "answer tokens": tokens,
                "engine ms": statistics.median(alone for alone, _, _ in times) * 1e3,
                "whole ms": statistics.median(whole for _, whole, _ in times) * 1e3,
                # Pair by pair: what the machine does in the meantime is the same for both.
                "adds ms": statistics.median(whole - alone for alone, whole, _ in times) * 1e3,
                "front end's CPU ms": statistics.fmean(cpu for _, _, cpu in times) * 1e3,
            }
        )
    goals = [
        Goal(f"{row['way']}, {row['answer tokens']} tokens: added ms", row["adds ms"], _PROMISE_MS, True)
        for row in rows
    ]
    return Report("gateway", rows, goals)


def _timed(server: Served, ask: Callable[..., object], *args: object) -> tuple[float, float]:
    """Seconds, and CPU seconds of the front end meanwhile (in ticks of 10 ms: only their mean says something)."""
    before, started = server.front_end.cpu_times(), time.perf_counter()
    ask(*args)
    seconds, after = time.perf_counter() - started, server.front_end.cpu_times()
    return seconds, after.user + after.system - before.user - before.system


def _question(turn: int) -> str:
    """Another one for each turn, all of one length."""
    digits = [turn // len(_WORDS) ** place % len(_WORDS) for place in range(3)]
    return f"is there a {' or a '.join(_WORDS[digit] for digit in digits)} in this picture"


class _Local:
    """The engine in this process: token ids in, token ids out."""

    def __init__(self) -> None:
        model = str(checkpoint_path())
        self._processor = InputProcessor.from_pretrained(model)
        # Random weights, which know no end: an answer has as many tokens as it may.
        config = EngineConfig(model=model, load_format="dummy", dtype="float32", threads=1, prefix_cache=False)
        self._engine = LocalEngine(config)

    def read(self, question: str, tokens: int) -> Request:
        """What the front end makes of a question."""
        prompt_ids = self._processor.encode(self._processor.chat(question)).prompt_ids
        return Request(request_id="r", prompt_ids=prompt_ids, sampling=SamplingParams(max_tokens=tokens))

    def ask(self, request: Request) -> None:
        (outputs,) = self._engine.run([request]).values()
        assert outputs[-1].finish_reason == "length", outputs[-1]


class _Web:
    """One kept connection to the HTTP API."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def ask(self, question: str, tokens: int, **more: Any) -> bytes:
        body = {"model": "embedded", "messages": [{"role": "user", "content": question}], "max_tokens": tokens, **more}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
        return answer

    def stream(self, question: str, tokens: int) -> None:
        assert self.ask(question, tokens, stream=True).endswith(b"data: [DONE]\n\n")
