"""The one-sided confidence bound of a share of right answers: for packing, promotion and rollback."""

from __future__ import annotations


def lower_bound(num_right: int, count: int, confidence: float) -> float:
    """Clopper and Pearson's exact bound, which the true share exceeds with a probability of at least `confidence`.

    It is 0 without samples.
    """
    from scipy.stats import binomtest  # takes most of a second to import

    if count == 0:
        return 0.0
    test = binomtest(num_right, count, alternative="greater")
    return float(test.proportion_ci(confidence, method="exact").low)
