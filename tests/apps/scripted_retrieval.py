"""A client for retrieval that answers by a picture's brightness, without a server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np

from vlora.client import Answer, HeadResult
from vlora.client.values import HeadOutcome, TokenLogprob
from vlora.errors import BadImage
from vlora.types import AdapterStatus, HeadSummary, Timings

TIMINGS = Timings(
    queue_s=0.0,
    ttft_s=0.0,
    latency_s=0.0,
    num_prompt_tokens=1,
    num_completion_tokens=1,
    num_preemptions=0,
    steps_by_mode={},
)
SHADES = {"dark": 20, "dim": 90, "grey": 140, "bright": 230}


def brightness(picture: bytes) -> float:
    decoded = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR)
    assert decoded is not None
    return float(decoded.mean())


def shade_of(picture: bytes) -> str:
    value = brightness(picture)
    return min(SHADES, key=lambda name: abs(SHADES[name] - value))


def answer_of(text: str, *top: tuple[str, float]) -> Answer:
    """An answer of one token, with the most likely tokens and their probabilities."""
    scored = tuple((token, math.log(probability)) for token, probability in top)
    logprobs = (TokenLogprob(token=text, logprob=scored[0][1], top=scored),) if scored else ()
    return Answer(
        text=text,
        finish_reason="stop",
        adapter=None,
        num_prompt_tokens=1,
        num_completion_tokens=1,
        timings=TIMINGS,
        total_s=0.0,
        logprobs=logprobs,
    )


class ScriptedClient:
    """The calls of `Client` that retrieval uses.

    Captions name a picture's shade. A question "Is there SHADE?" is answered yes with a probability that falls with the
    distance to the shade. asked: questions with the number of frames, in the order they arrive. fails_at: the number of
    the caption, from 0, that fails as a picture would. version_once_loaded: of the adapter after the first answer.
    """

    def __init__(self, model: str = "scripted", version: str = "v1") -> None:
        self.model, self.version = model, version
        self.asked: list[tuple[str, int]] = []
        self.fails_at: int | None = None
        self.version_once_loaded: str | None = None

    def stats(self) -> Any:
        return SimpleNamespace(model=self.model)

    def adapters(self) -> tuple[AdapterStatus, ...]:
        heads = (
            HeadSummary(name="night", task="classification", labels=("day", "night"), prompt="?", num_frames=1),
            HeadSummary(name="moves", task="action", labels=("moves", "stands"), prompt="?", num_frames=3),
        )
        return (
            AdapterStatus(
                name="cam",
                version=self.version,
                rank=1,
                num_bytes=1,
                resident=True,
                mergeable=True,
                merge_fidelity=1.0,
                touches_vision=False,
                heads=heads,
            ),
        )

    def ask_heads(self, frames: Sequence[bytes], heads: Sequence[tuple[str, str]]) -> tuple[HeadOutcome, ...]:
        self.asked += [(head, len(frames)) for _, head in heads]
        self.version = self.version_once_loaded or self.version
        label = "night" if brightness(frames[0]) < 100 else "day"
        return tuple(
            HeadOutcome(
                answer=HeadResult(
                    task="classification",
                    label=label if head == "night" else "stands",
                    confidence=0.75,
                    labels=("day", "night"),
                    adapter=adapter,
                    head=head,
                    timings=TIMINGS,
                    total_s=0.0,
                )
            )
            for adapter, head in heads
        )

    def generate(self, question: str, frames: Sequence[bytes], adapter: str | None = None, **sampling: Any) -> Answer:
        self.asked.append((question, len(frames)))
        if not question.startswith("Is there"):
            if self.fails_at is not None and len(self.asked) > self.fails_at:
                raise BadImage("image 1 cannot be read")
            return answer_of(f"a {shade_of(frames[0])} picture", ("a", 0.5))
        wanted = SHADES[question.removeprefix("Is there ").rstrip("?")]
        yes = 0.9 - abs(brightness(frames[0]) - wanted) / 300
        return answer_of("no", ("no", 0.99 - yes), (" Yes", yes / 2), ("yes", yes / 2))
