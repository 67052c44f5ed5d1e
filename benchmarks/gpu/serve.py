"""The engine under load: 64 requests over 32 adapters in a burst and with Poisson arrivals, and 32 streams over 8
adapters, against transformers with PEFT's mixed batch on the same prompts.

The engine runs in this process: a server's front end, its processes and image processing are not part of the figures,
on either side.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.arrivals import WallClock, poisson, steps
from benchmarks.gpu.profile import memory_gib
from vlora.bench.gpu import models
from vlora.bench.gpu.context import Context
from vlora.bench.report import Goal
from vlora.bench.serve.baseline import Baseline, PreparedRequest
from vlora.bench.serve.load import LoadRun, ObservedAnswer, row
from vlora.bench.timed_engine import TimedEngine

_RANK = 16
_POISSON_LOAD = 0.8  # of the burst's requests per second
_BATCH = 32
_PEER_RESERVE_S = 10.0


class Load(NamedTuple):
    """Requests over a number of adapters, used in turn."""

    requests: int
    adapters: int
    prompt_tokens: int
    answer_tokens: int

    def prepared(self, seed: int) -> list[PreparedRequest]:
        draws = random.Random(seed)
        return [
            PreparedRequest(
                tuple(draws.choices(range(4, 1000), k=self.prompt_tokens)),
                (),
                number % self.adapters,
                self.answer_tokens,
            )
            for number in range(self.requests)
        ]


MIXED = Load(64, 32, 256, 64)
STREAMS = Load(32, 8, 256, 512)  # the first one still decodes when the last one begins
_SMALL_MIXED, _SMALL_STREAMS = Load(6, 3, 12, 4), Load(4, 2, 12, 6)


def run(context: Context) -> dict[str, Any]:
    """Ours first; then the model of the baseline takes the memory."""
    mixed, streams = (MIXED, STREAMS) if context.on_gpu else (_SMALL_MIXED, _SMALL_STREAMS)
    rows: list[dict[str, Any]] = []
    model, adapters = models.built(context), {_RANK: mixed.adapters}
    engine = models.timed_engine(context, model, adapters, background=True, max_batch_size=_BATCH)
    del model
    _serve(engine, mixed.prepared(0)[: mixed.adapters], [0.0] * mixed.adapters)  # loads adapters, compiles kernels
    burst = _serve(engine, mixed.prepared(1), [0.0] * mixed.requests)
    rows.append(row([burst], case="burst", by="vlora"))
    rate = _POISSON_LOAD * mixed.requests / burst.seconds
    arriving = _serve(engine, mixed.prepared(2), poisson(rate, mixed.requests))
    rows.append(row([arriving], case=f"Poisson, {rate:.1f} requests/s", by="vlora"))
    decoding = _serve(engine, streams.prepared(3), [0.0] * streams.requests)
    tokens_per_s, tail = _while_all_decode(decoding)
    rows.append(row([decoding], case=f"{streams.requests} streams, {streams.adapters} adapters", by="vlora"))
    stats = engine.engine.stats()
    found: dict[str, Any] = {
        "rows": rows,
        "decode tokens/s": tokens_per_s,
        "decode p99 / p50": tail,
        "loads": {"mixed": mixed._asdict(), "streams": streams._asdict()},
        "engine": {"switches": stats.num_switches, "preemptions": stats.num_preemptions},
        "reserved_gib": memory_gib(context),
    }
    context.keep(found)
    engine.engine.close()
    del engine
    gc.collect()
    if context.on_gpu:
        torch.cuda.empty_cache()
    found["summary"] = f"{tokens_per_s:.0f} tokens/s decoding"
    peer, ratio = _peer(context, mixed), None
    if peer is not None:
        rows.append(row([peer], case="burst", by="transformers + PEFT mixed"))
        ratio = burst.tokens_per_s / peer.tokens_per_s
        found |= {"burst / PEFT": ratio, "summary": f"{found['summary']}; burst {ratio:.2f} x PEFT's"}
    return found | {"goals": goals_of(tokens_per_s, tail, ratio, context.gpu) if context.on_gpu else []}


def _serve(engine: TimedEngine, requests: Sequence[PreparedRequest], due_s: Sequence[float]) -> LoadRun:
    """Add each request when it is due, in seconds from now, and run steps until all are answered."""
    clock = WallClock()
    started = clock()
    answers = [
        ObservedAnswer(started + due, prompt_tokens=len(request.prompt_ids))
        for request, due in zip(requests, due_s, strict=True)
    ]

    def add(number: int) -> None:
        own = requests[number]
        engine.add(own.prompt_ids, own.answer_tokens, f"r{_RANK}-{own.adapter}", request_id=str(number))

    for outputs in steps(engine, due_s, add, clock):
        now = clock()
        for output in outputs:
            answer = answers[int(output.request_id)]
            answer.answer_tokens += len(output.token_ids)
            answer.pieces_s.append(now)
            answer.end_s = now
    return LoadRun(answers, started, max(answer.end_s for answer in answers))


def _while_all_decode(run: LoadRun) -> tuple[float, float]:
    """Tokens per second, and p99 / p50 of the time between tokens, while every request decodes: from the last first
    token to the first end. Before that, a step also computes prompts, which all wait for; the row of the case has it.
    """
    start = max(answer.pieces_s[0] for answer in run.answers)
    stop = min(answer.end_s for answer in run.answers)
    times = [[piece for piece in answer.pieces_s if start < piece <= stop] for answer in run.answers]
    gaps = [after - before for own in times for before, after in itertools.pairwise(own)]
    if not gaps:
        return 0.0, math.inf
    middle, tail = np.quantile(gaps, (0.5, 0.99)).tolist()
    return sum(map(len, times)) / (stop - start), tail / middle


def _peer(context: Context, load: Load) -> LoadRun | None:
    """Serve the burst's requests in batches, after a short warm-up; None if the time is too short for it."""
    model = models.built(context)
    model.generation_config.eos_token_id = None
    baseline = Baseline.random(model, load.adapters, _RANK)
    requests = load.prepared(1)
    short = [request._replace(answer_tokens=3) for request in requests[:_BATCH]]
    seconds = [baseline.run(short, _BATCH).seconds for _ in range(2)]
    expected = min(seconds) / 3 * load.answer_tokens * -(-load.requests // _BATCH)
    if expected > context.left_s - _PEER_RESERVE_S:
        return None
    return baseline.run(requests, _BATCH)


_LEAST_TOKENS = {"H100": 4000.0, "H200": 7000.0}


def goals_of(tokens_per_s: float, tail: float, ratio: float | None, gpu: str) -> list[Goal]:
    streams = "32 streams over 8 adapters, tokens/s while decoding"
    return [
        *([Goal(streams, tokens_per_s, _LEAST_TOKENS[gpu], False)] if gpu in _LEAST_TOKENS else []),
        *([] if ratio is None else [Goal("burst / transformers + PEFT's mixed batch, tokens/s", ratio, 3.0, False)]),
        Goal("p99 / p50 of the time between tokens while all decode", tail, 1.5, True),
    ]
