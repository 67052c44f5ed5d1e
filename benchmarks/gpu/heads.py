"""The answer of a task head against an answer in words, over a picture each, on an idle engine and beside 32 streams
(V-LoRA's figure 16).
"""

from __future__ import annotations

import statistics
from typing import Any

from vlora.bench.dummy import dummy_picture, unseen
from vlora.bench.gpu import models
from vlora.bench.gpu.context import Context, elapsed, repeats
from vlora.bench.report import Goal
from vlora.bench.timed_engine import HEAD, TimedEngine
from vlora.types import VisionInput

LOADS, SIDE, PROMPT = (0, 32), 32, 512
_SMALL_LOADS, _SMALL_SIDE, _SMALL_PROMPT = (0, 2), 4, 16
_WORDS, _ADAPTERS = 8, 8  # tokens of a prompt and of an answer; adapters of the streams
_LEAST_SAVED = 0.41


def run(context: Context) -> dict[str, Any]:
    model = models.built(context)
    large = context.on_gpu
    picture = dummy_picture(model.config, SIDE if large else _SMALL_SIDE)
    prompt = PROMPT if large else _SMALL_PROMPT
    loads = LOADS if large else _SMALL_LOADS
    engine = models.timed_engine(
        context, model, {16: _ADAPTERS}, heads=True, context=prompt, max_batch_size=loads[-1] + 1, longest=2048
    )
    rows: list[dict[str, Any]] = []
    for load in loads:
        engine.begin([f"r16-{number % _ADAPTERS}" for number in range(load)])
        for head in (None, HEAD):
            seconds = [_answer(context, engine, picture, head) for _ in range(2 + repeats(context))][2:]
            rows.append(
                {
                    "streams": load,
                    "answer": "words" if head is None else "head",
                    "ms": 1e3 * statistics.median(seconds),
                    "slowest ms": 1e3 * max(seconds),
                }
            )
            context.keep({"rows": rows})
        engine.keep(0)
    goals = goals_of(rows)
    summary = "; ".join(f"{goal.name} {goal.value:.2f}" for goal in goals)
    return {"summary": summary, "rows": rows, "goals": goals if large else []}


def _answer(context: Context, engine: TimedEngine, picture: VisionInput, head: str | None) -> float:
    """Seconds of a request with a new picture, from its arrival to its end."""
    answered = False

    def serve() -> None:
        nonlocal answered
        own = engine.add(_WORDS, 1 if head else _WORDS, "r16-0", [unseen(picture)], head=head)
        while not answered:
            answered = any(output.request_id == own and output.finished for output in engine.step())

    return elapsed(serve, context)


def goals_of(rows: list[dict[str, Any]]) -> list[Goal]:
    ms = {(row["streams"], row["answer"]): row["ms"] for row in rows}
    return [
        Goal(f"time saved by a head, {load} streams", 1 - ms[load, "head"] / ms[load, "words"], _LEAST_SAVED, False)
        for load in sorted({row["streams"] for row in rows})
    ]
