"""Limits how long an adapter stays resident while requests wait for others."""

from __future__ import annotations

from vlora.types import MemoryView

_QUANTUM = 8  # residency quantum, as a multiple of the load time
_SMOOTH = 1 / 8  # weight of the newest load in the moving average


class ResidencyQuantum:
    """Adapter clustering for requests that are admitted immediately (S-LoRA section 4.2).

    If more adapters are needed than memory holds, a loaded adapter serves its requests for a while before it is
    replaced. Otherwise each step would load adapters that the next one evicts, and few would be available to run.

    An adapter stays for at most `_QUANTUM` times the average recent load time. A load is measured from when it is first
    seen, so time behind other loads is included. A request therefore gets its adapter after as many quanta as it takes
    to load all needed adapters, independent of the length of other answers.
    """

    def __init__(self) -> None:
        self._loading_since_s: dict[str, float] = {}  # first seen loading, by adapter
        self._resident_since_s: dict[str, float] = {}
        self._resident: frozenset[str] = frozenset()
        self._load_s = 0.0

    def observe(self, view: MemoryView, now: float) -> None:
        """Record loaded and evicted adapters; cheap if nothing changed."""
        if view.resident is not self._resident:
            for name in view.resident - self._resident:
                self._resident_since_s[name] = now
                self._load_s += _SMOOTH * (now - self._loading_since_s.get(name, now) - self._load_s)
            for name in self._resident - view.resident:
                del self._resident_since_s[name]
            self._resident = view.resident
        if view.loading or self._loading_since_s:
            self._loading_since_s = {name: self._loading_since_s.get(name, now) for name in view.loading}

    def has_expired(self, name: str, now: float) -> bool:
        return now - self._resident_since_s.get(name, now) >= _QUANTUM * self._load_s
