"""Limits how long an adapter stays resident while others are wanted."""

from __future__ import annotations

from vlora.types import MemoryView

_WORTH = 8  # residency quantum, as a multiple of the load time
_SMOOTH = 1 / 8  # weight of the newest load in the moving average


class Stays:
    """Adapter clustering for requests that are admitted immediately (S-LoRA section 4.2).

    If more adapters are needed than memory holds, a loaded adapter serves its requests for a while before it is
    replaced. Otherwise each step would load adapters that the next one evicts, and few would be available to run.

    An adapter stays for at most `_WORTH` times the average recent load time, measured from when the load is first seen,
    so time behind other loads is included. A request therefore gets its adapter after as many quanta as it takes to
    load all wanted adapters, independent of the length of other answers.
    """

    def __init__(self) -> None:
        self._coming_s: dict[str, float] = {}  # first seen loading, by adapter
        self._came_s: dict[str, float] = {}
        self._resident: frozenset[str] = frozenset()
        self._bring_s = 0.0

    def see(self, view: MemoryView, now: float) -> None:
        """Record loaded and evicted adapters; cheap if nothing changed."""
        if view.resident is not self._resident:
            for name in view.resident - self._resident:
                self._came_s[name] = now
                self._bring_s += _SMOOTH * (now - self._coming_s.get(name, now) - self._bring_s)
            for name in self._resident - view.resident:
                del self._came_s[name]
            self._resident = view.resident
        if view.loading or self._coming_s:
            self._coming_s = {name: self._coming_s.get(name, now) for name in view.loading}

    def is_over(self, name: str, now: float) -> bool:
        """Whether an adapter has been resident for its full quantum."""
        return now - self._came_s.get(name, now) >= _WORTH * self._bring_s
