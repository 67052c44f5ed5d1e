"""The workload of `vlora bench serve`: its fields are also options. Loads without numpy and torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from vlora.config import check_settings, setting
from vlora.errors import BadConfig

if TYPE_CHECKING:
    from vlora.simulator.arrivals import Arrival

_PIXELS_PER_TOKEN = 28
"""Side in pixels of the square that one token of Qwen2-VL covers."""
_TEMPLATE_TOKENS = 5
"""Tokens of a chat template around one user turn, in addition to two marks for each picture."""
_setting = functools.partial(setting, heading="Workload of `serve`")


@dataclasses.dataclass(frozen=True)
class Workload:
    """The traffic sent to a server.

    requests: At most so many; None with `duration_s`. concurrency: each request is replaced when it ends (closed loop).
    popularity: uniform is in turn, so that every adapter gets the same number; zipf gives the i-th a share proportional
    to 1/i; hottest gives the first the share `skew`. seed: Of all random values.

    Raises:
        BadConfig: A value is invalid.
    """

    requests: int | None = _setting(8, text="Number of requests.", least=1)
    duration_s: float | None = _setting(
        None, text="Send requests for this many seconds instead of a fixed number.", above=0, most=1e9
    )
    concurrency: int = _setting(8, text="Outstanding requests at any time.", least=1)
    rate: float | None = _setting(
        None, text="Requests per second with Poisson arrivals (open loop).", above=0, most=1e9
    )
    trace: str | None = _setting(
        None,
        text="Arrivals, lengths, adapters and numbers of pictures of a CSV file or workload of `vlora simulate`, as "
        "hottest:rate=1,skew=0.8.",
    )
    adapters: int = _setting(4, text="Number of adapters.", least=1)
    popularity: Literal["uniform", "zipf", "hottest"] = _setting("uniform", text="How requests choose adapters.")
    skew: float = _setting(0.6, text="The hottest adapter's share.", above=0, most=1)
    prompt_tokens: int = _setting(256, text="Tokens per prompt with its pictures and template.", least=1)
    answer_tokens: int = _setting(32, text="Tokens per answer.", least=1)
    pictures: int = _setting(1, text="Pictures per request, all of them different.", least=0)
    picture_width: int = _setting(224, text="Pixels.", least=1)
    picture_height: int = _setting(224, text="Pixels.", least=1)
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.requests is None) == (self.duration_s is None):
            raise BadConfig("give either a number of requests or a duration (exactly one)")
        if self.trace is not None and self.rate is not None:
            raise BadConfig(f"rate is {self.rate} and trace {self.trace!r}, which has its own times; give one of them")
        if self.num_words(self.prompt_tokens, self.pictures) < 1:
            taken = self.prompt_tokens - self.num_words(self.prompt_tokens, self.pictures)
            raise BadConfig(
                f"prompt_tokens is {self.prompt_tokens}, of which pictures and template take {taken}; give at least "
                f"{taken + 1}"
            )

    def num_words(self, prompt_tokens: int, pictures: int) -> int:
        """Words of text that make a prompt so long, at one token per word."""
        side_tokens = [max(1, round(side / _PIXELS_PER_TOKEN)) for side in (self.picture_width, self.picture_height)]
        return prompt_tokens - _TEMPLATE_TOKENS - pictures * (math.prod(side_tokens) + 2)

    def traced(self) -> Iterator[Arrival]:
        """The arrivals of `trace`."""
        from vlora.simulator.workloads import arrivals_of

        assert self.trace is not None
        return arrivals_of(self.trace, self.adapters, self.requests, self.seed)
