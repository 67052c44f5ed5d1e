"""Requests: as a workload or a trace generates them, on their way through the replicas; how they choose adapters."""

from __future__ import annotations

import math
from typing import NamedTuple

from vlora.routing import Need


class Arrival(NamedTuple):
    """One request. time_s: seconds from the start, nondecreasing within a workload. adapter None: the base model.

    answer_tokens 0: a task head answers in one pass over the prompt. max_ttft_s, priority, tenant: as of a request.
    images: the patches of each image (`VisionInput.num_patches`), 0 for one with cached embeddings; their tokens are
    included in the prompt's. prefix: arrivals with the same one begin with the same `prefix_tokens` tokens.
    """

    time_s: float
    adapter: str | None
    prompt_tokens: int
    answer_tokens: int
    max_ttft_s: float | None = None
    priority: int = 0
    tenant: str | None = None
    images: tuple[int, ...] = ()
    prefix: str | None = None
    prefix_tokens: int = 0


class Job:
    """One request on its way through the replicas. Times are in seconds of the world; negative ones are not known."""

    __slots__ = ("answered", "arrival", "first_s", "need", "num_reused", "refused_s")

    def __init__(self, arrival: Arrival, need: Need) -> None:
        self.arrival = arrival
        self.need = need  # as of its last submission to the router
        self.answered = 0  # tokens, when it was last sent
        self.num_reused = 0  # prompt tokens found in a prefix cache
        self.first_s = -1.0  # of its first answer
        self.refused_s = -1.0  # because of its deadline

    @property
    def num_tokens(self) -> int:
        """Tokens with KV when it is sent: the prompt, and what was answered."""
        return self.arrival.prompt_tokens + self.answered

    @property
    def left(self) -> int:
        """Answers that remain; a task head gives one."""
        return max(1, self.arrival.answer_tokens) - self.answered


def adapter_name(number: int) -> str:
    """Adapters are numbered by popularity: adapter-0 is the hottest."""
    return f"adapter-{number}"


def tenant_name(number: int) -> str:
    """Tenants are numbered by demand: tenant-0 has the most requests."""
    return f"tenant-{number}"


def power_law(num_adapters: int, alpha: float) -> list[float]:
    """The i-th adapter's share is proportional to i ** -alpha (S-LoRA section 7.2). alpha 0: equal shares."""
    return _normed([(i + 1) ** -alpha for i in range(num_adapters)])


def hottest(num_adapters: int, skew: float) -> list[float]:
    """The hottest adapter has the share `skew`, the others share the rest equally (V-LoRA section 6.3.3).

    A skew below an equal share gives equal shares: the hottest adapter cannot have less than the others.
    """
    if num_adapters == 1 or skew * num_adapters <= 1:
        return [1 / num_adapters] * num_adapters
    return [skew] + [(1 - skew) / (num_adapters - 1)] * (num_adapters - 1)


def punica(pattern: str, num_requests: int) -> list[float] | None:
    """Punica's popularity patterns (section 7). None for `distinct`, where every request has its own adapter.

    uniform: sqrt(n) equally popular adapters for n requests. skewed: each adapter is 1.5 times as popular as the next.
    identical: one adapter.
    """
    if pattern == "distinct":
        return None
    if pattern == "uniform":
        count = math.isqrt(num_requests - 1) + 1
        return [1 / count] * count
    if pattern == "skewed":
        # Adapters for which less than one request is expected add nothing.
        count = max(1, math.ceil(math.log(num_requests, 1.5)))
        return _normed([1.5**-i for i in range(count)])
    assert pattern == "identical", pattern
    return [1.0]


def _normed(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]
