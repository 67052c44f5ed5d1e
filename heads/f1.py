"""F1 as a ratio of sums over samples, so that a part of the samples needs no further comparison."""

from __future__ import annotations

from collections.abc import Iterable

F1Counts = tuple[int, int]
"""Of a sample: twice the number of correct answers, and the number of answers and labels together."""


def f1_of(counts: Iterable[F1Counts]) -> float:
    """Micro F1 over samples; 1 if there are neither answers nor labels."""
    both, total = map(sum, zip(*counts, strict=True))
    return both / total if total else 1.0
