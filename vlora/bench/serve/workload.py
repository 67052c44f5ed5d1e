"""The requests of a run: adapter, text, pictures, answer length, and due time of each."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import random
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from vlora.errors import BadConfig
from vlora.simulator.arrivals import hottest, power_law

WORDS = (
    *("a", "an", "the", "is", "are", "was", "in", "on", "at", "of", "to", "and", "or", "not", "with", "from", "this"),
    *("that", "it", "there", "what", "which", "where", "when", "how", "many", "picture", "image", "scene", "street"),
    *("house", "tree", "car", "road", "sky", "water", "light", "door", "window", "table", "chair", "person", "child"),
    *("dog", "cat", "bird", "red", "green", "blue", "yellow", "black", "white", "small", "large", "old", "new", "left"),
    *("right", "above", "below", "near", "far", "open", "closed", "first", "last"),
)
_PIXELS_PER_TOKEN = 28
"""Side in pixels of the square that one token of Qwen2-VL covers."""
_TEMPLATE_TOKENS = 5
"""Tokens of a chat template around one user turn, in addition to two marks for each picture."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The traffic sent to a server.

    Attributes:
        requests: Number of requests; None with `duration_s`.
        duration_s: Send requests for this many seconds instead of a fixed number.
        concurrency: Outstanding requests at any time, each replaced when it ends (closed loop).
        rate: Requests per second with Poisson arrivals (open loop), independent of outstanding requests; None for a
            closed loop.
        adapters: Number of adapters.
        popularity: How requests choose among adapters: uniform (in turn, so that every adapter gets the same number),
            zipf (the i-th with a share proportional to 1/i), or hottest (the first with the share `skew`).
        skew: Share of the hottest adapter.
        prompt_tokens: Tokens of a prompt, with its pictures and template.
        answer_tokens: Tokens of an answer.
        pictures: Pictures per request; all pictures of a run are different.
        picture_width: Of each picture, in pixels.
        picture_height: Of each picture, in pixels.
        seed: Of all random values.

    Raises:
        BadConfig: A value is invalid.
    """

    requests: int | None = 8
    duration_s: float | None = None
    concurrency: int = 8
    rate: float | None = None
    adapters: int = 4
    popularity: Literal["uniform", "zipf", "hottest"] = "uniform"
    skew: float = 0.6
    prompt_tokens: int = 256
    answer_tokens: int = 32
    pictures: int = 1
    picture_width: int = 224
    picture_height: int = 224
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("concurrency", "answer_tokens", "adapters", "picture_width", "picture_height"):
            if getattr(self, field) < 1:
                raise BadConfig(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.pictures < 0:
            raise BadConfig(f"pictures is {self.pictures}; it must be 0 or more")
        if (self.requests is None) == (self.duration_s is None):
            raise BadConfig("give either a number of requests or a duration (exactly one)")
        for field, value in (("requests", self.requests), ("duration_s", self.duration_s), ("rate", self.rate)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise BadConfig(f"{field} is {value}; it must be above 0")
        if self.popularity not in ("uniform", "zipf", "hottest"):
            raise BadConfig(f"popularity is {self.popularity!r}; choose uniform, zipf or hottest")
        if not 0 < self.skew <= 1:
            raise BadConfig(f"skew is {self.skew}; it must be between 0 and 1")
        if self.num_words < 1:
            raise BadConfig(
                f"prompt_tokens is {self.prompt_tokens}, of which pictures and template take "
                f"{self.prompt_tokens - self.num_words}; give at least {self.prompt_tokens - self.num_words + 1}"
            )

    @property
    def num_words(self) -> int:
        """Words of text that make a prompt `prompt_tokens` long, at one token per word."""
        side_tokens = [max(1, round(side / _PIXELS_PER_TOKEN)) for side in (self.picture_width, self.picture_height)]
        return self.prompt_tokens - _TEMPLATE_TOKENS - self.pictures * (math.prod(side_tokens) + 2)


class WorkloadRequest(NamedTuple):
    """One request."""

    adapter: int | None  # its index, or None for the base model
    text: str  # of the prompt
    pictures: tuple[bytes, ...]  # JPEG files
    answer_tokens: int  # tokens of the answer


def workload_requests(workload: Workload, *, adapted: bool) -> Iterator[WorkloadRequest]:
    """Requests without end, identical for the same workload."""
    chosen = _adapters(workload) if adapted else itertools.repeat(None)
    for number, adapter in enumerate(chosen):
        draws = random.Random(f"{workload.seed} {number}")
        pictures = tuple(_picture(workload, number, place) for place in range(workload.pictures))
        text = " ".join(draws.choices(WORDS, k=workload.num_words))
        yield WorkloadRequest(adapter, text, pictures, workload.answer_tokens)


def arrivals(workload: Workload) -> Iterator[float]:
    """Endless due times in seconds from the start, in a Poisson process of the workload's rate."""
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
