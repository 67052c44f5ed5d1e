"""How sure a measured accuracy is: lower confidence bounds, one-sided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from scipy.stats import binomtest

from fusion.pack import Score

_RESAMPLES = 400
Target = TypeVar("Target")


def bounded(
    metric: Callable[[Sequence[object], Sequence[Target]], float],
    answers: Sequence[object],
    targets: Sequence[Target],
    *,
    confidence: float,
    seed: int = 0,
) -> Score:
    """A metric over samples with the bound that its true value exceeds with probability `confidence`.

    Where the metric is the share of samples answered right: Clopper and Pearson's exact bound, which never promises too
    much. Else (F1, mean average precision) a percentile of the metric over resampled samples; `seed` draws them.
    """
    value = metric(answers, targets)
    single = [metric([answer], [target]) for answer, target in zip(answers, targets, strict=True)]
    if all(one in (0.0, 1.0) for one in single) and np.isclose(np.mean(single), value):
        test = binomtest(round(sum(single)), len(single), alternative="greater")
        return Score(value, float(test.proportion_ci(confidence, method="exact").low))
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(_RESAMPLES):
        rows = rng.integers(len(answers), size=len(answers))
        found.append(metric([answers[row] for row in rows], [targets[row] for row in rows]))
    return Score(value, min(value, float(np.quantile(found, 1 - confidence))))
