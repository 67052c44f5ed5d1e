"""The popularity of adapters: weights that sum to 1, the hottest first."""

from __future__ import annotations

import math


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
