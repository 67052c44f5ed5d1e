"""Number of validation samples that a threshold needs at a confidence."""

from __future__ import annotations

import numpy as np
from scipy.stats import binom

POWER = 0.8  # probability with which a good adapter passes
MOST = 5_000


def samples_needed(threshold: float | None, better: float, confidence: float) -> int | None:
    """The smallest number n of validation samples at which an adapter that is `better` above its threshold t passes
    with probability `POWER`; None above `MOST`.

    For a share of correct answers. Clopper and Pearson's lower bound of k correct answers among n reaches t exactly if
    P(Bin(n, t) >= k) <= 1 - confidence. With c(n) the smallest such k, the adapter passes with probability
    P(Bin(n, min(1, t + better)) >= c(n)).

    Args:
        threshold: None if it is unknown: then the one that needs most samples; t and t + better are near a half.
    """
    if threshold is None:
        threshold = 0.5 - better / 2
    numbers = np.arange(1, MOST + 1)
    below = binom.isf(1 - confidence, numbers, threshold)  # c(n) - 1
    passes = binom.sf(below, numbers, min(1.0, threshold + better)) >= POWER
    return int(numbers[passes.argmax()]) if passes.any() else None
