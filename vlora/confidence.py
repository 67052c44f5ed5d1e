"""One-sided confidence bounds of a share of right answers: for packing, promotion and rollback."""

from __future__ import annotations

import math


def lower_bound(num_right: int, count: int, confidence: float) -> float:
    """Clopper and Pearson's exact bound, which the true share exceeds with a probability of at least `confidence`.

    It is 0 without samples.
    """
    from scipy.special import betaincinv

    if not num_right:
        return 0.0
    return float(betaincinv(num_right, count - num_right + 1, 1 - confidence))


def upper_bound(num_right: int, count: int, confidence: float) -> float:
    """As `lower_bound`, from above; 1 without samples."""
    return 1 - lower_bound(count - num_right, count, confidence)


def lower_bound_at_all_times(num_right: int, count: int, confidence: float) -> float:
    """A lower bound that may be looked at after every sample.

    The probability that it is ever above the true share is at most 1 - `confidence`, by Ville's inequality for the
    likelihood ratio of uniformly mixed shares. A bound for one look is above it sooner or later.
    """
    from scipy.optimize import brentq
    from scipy.special import betaln

    if not num_right:
        return 0.0
    num_wrong = count - num_right
    wanted = betaln(num_right + 1, num_wrong + 1) + math.log(1 - confidence)

    def excess(share: float) -> float:
        return num_right * math.log(share) + (num_wrong * math.log1p(-share) if num_wrong else 0.0) - wanted

    return float(brentq(excess, 1e-300, num_right / count))
