"""One-sided lower confidence bounds of measured scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from fusion.packing.algorithm import Score
from heads.f1 import F1Counts, f1_of
from vlora.confidence import lower_bound

_RESAMPLES = 400
Target = TypeVar("Target")


def score_with_bound(
    metric: Callable[[Sequence[object], Sequence[Target]], float],
    answers: Sequence[object],
    targets: Sequence[Target],
    *,
    mean: bool,
    confidence: float,
    counts: Sequence[F1Counts] = (),
    seed: int = 0,
) -> Score:
    """A metric over samples, with the bound that its true value exceeds with probability `confidence`.

    If the values on single samples are all 0 or 1, the bound is Clopper and Pearson's exact one, which is conservative.
    Otherwise (F1, mean average precision, F1 of words) it is a percentile of the metric over resampled samples.

    Args:
        mean: whether the metric is the mean of its values on single samples.
        counts: of each sample, if the metric is `f1_of` counts; then resampled samples are not compared again.
        seed: for resampling.
    """
    count = len(targets)
    if counts:
        known = np.array(counts)
        return _resampled(lambda rows: f1_of([known[rows].sum(0)]), f1_of(counts), count, confidence, seed)
    if not mean:

        def of(rows: np.ndarray) -> float:
            return metric([answers[row] for row in rows], [targets[row] for row in rows])

        return _resampled(of, metric(answers, targets), count, confidence, seed)
    single = np.array([metric([answer], [target]) for answer, target in zip(answers, targets, strict=True)])
    value = float(single.mean())
    if set(single) <= {0.0, 1.0}:
        return Score(value, lower_bound(round(single.sum()), count, confidence))
    return _resampled(lambda rows: float(single[rows].mean()), value, count, confidence, seed)


def _resampled(of: Callable[[np.ndarray], float], value: float, count: int, confidence: float, seed: int) -> Score:
    """The percentile bootstrap (Efron 1979) over the samples and one extra sample with value 0.

    Without the extra sample, a score of 1 would have the bound 1, however few samples there are. Clopper and Pearson's
    bound includes it as well: for r right and w wrong it is a quantile of Beta(r, w + 1).
    """
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(_RESAMPLES):
        rows = rng.integers(count + 1, size=count)
        seen = rows[rows < count]
        found.append(of(seen) * len(seen) / count if len(seen) else 0.0)
    return Score(value, min(value, float(np.quantile(found, 1 - confidence))))
