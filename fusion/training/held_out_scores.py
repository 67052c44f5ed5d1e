"""Scores of held-out samples during a training, for display only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fusion.packing.algorithm import Adapter

EVERY_S = 10.0
SHARE = 1 / 100  # maximum share of a training's time for this scoring
_SAMPLES, _FEWEST = 64, 8  # samples over all domains of an adapter, and minimum per domain


class HeldOutScores:
    """Scores of held-out samples, updated at intervals.

    Args:
        score: returns a domain's score, 0 to 1, on its first given number of validation samples.
        clock: returns seconds from any origin.
    """

    def __init__(self, score: Callable[[str, int], float], domains: Adapter, clock: Callable[[], float]) -> None:
        self._score = score
        self._domains = domains
        self._clock = clock
        self._due = clock() + EVERY_S
        self._scores: Mapping[str, float] = {}

    @property
    def due(self) -> bool:
        """Whether ten seconds and a hundred times the duration of the last scoring have passed since it."""
        return self._clock() >= self._due

    def update(self) -> None:
        began = self._clock()
        count = max(_FEWEST, _SAMPLES // len(self._domains))
        self._scores = {name: self._score(name, count) for name in self._domains}
        now = self._clock()
        self._due = now + max(EVERY_S, (now - began) / SHARE)

    def __str__(self) -> str:
        """One domain's score, or the mean of several and the lowest with its name. Empty before the first scoring."""
        if not self._scores:
            return ""
        lowest = min(self._scores, key=self._scores.__getitem__)
        value = sum(self._scores.values()) / len(self._scores)
        worst = f" (lowest {lowest} {self._scores[lowest]:.3f})" if len(self._scores) > 1 else ""
        return f"{value:.3f}{worst}"
