"""What the trainings of one method cost: each is counted once, although methods share stored trainings."""

from __future__ import annotations

import time
from collections.abc import Collection

from fusion.packing.algorithm import Adapter, History, TrainingResult
from fusion.packing.guided import Conflicts
from fusion.training.run_cache import RunCache


class Meter:
    """A `RunCache` that counts the distinct trainings that are requested.

    trainings: in single-domain trainings, measured conflicts included. seconds: of trainings with their scoring, and of
    measuring conflicts.
    """

    def __init__(self, cache: RunCache) -> None:
        self._cache = cache
        self._found: dict[object, tuple[int, float]] = {}
        self._conflicts = self._conflict_s = 0.0

    @property
    def trainings(self) -> float:
        return self._conflicts + sum(count for count, _ in self._found.values())

    @property
    def seconds(self) -> float:
        return self._conflict_s + sum(seconds for _, seconds in self._found.values())

    def __call__(self, adapter: Adapter) -> TrainingResult:
        return self._count(adapter, 1, self._cache(adapter))

    def together(self, domains: Collection[str]) -> TrainingResult:
        names = tuple(sorted(domains))
        # A single domain is the same training as in sequence.
        key: object = names if len(names) == 1 else frozenset(names)
        return self._count(key, len(names), self._cache.together(names))

    def join(self, before: History, beside: Adapter, domain: str) -> TrainingResult:
        return self._count((before, beside, domain), 1, self._cache.join(before, beside, domain))

    @property
    def conflict_cost(self) -> float:
        return self._cache.conflict_cost

    def conflicts(self, history: History, domains: Collection[str]) -> Conflicts:
        self._conflicts += self.conflict_cost * len(domains)
        started = time.perf_counter()
        found = self._cache.conflicts(history, domains)
        self._conflict_s += time.perf_counter() - started
        return found

    def _count(self, key: object, count: int, found: TrainingResult) -> TrainingResult:
        self._found[key] = (count, found.seconds)
        return found
