"""How long adapters have been in memory, and how long one may stay while others are wanted."""

from __future__ import annotations

from vlora.types import MemoryView

_WORTH = 8  # times as long as bringing one takes
_SMOOTH = 1 / 8  # weight of the newest in the average


class Stays:
    """Adapter clustering for requests that are let in at once (S-LoRA section 4.2): with more adapters needed than
    memory holds, one that was brought serves its requests for a while before another takes its place. Else each step
    would bring adapters that the next one evicts, and few would be there to run.

    One may stay for `_WORTH` times what bringing took of late, which counts from when it was first on its way, so with
    those before it. Who waits for an adapter therefore gets it after as many stays as it takes to bring all that are
    wanted, however long the answers of others are.
    """

    def __init__(self) -> None:
        self._coming_s: dict[str, float] = {}  # when each one on its way was first seen there
        self._came_s: dict[str, float] = {}
        self._resident: frozenset[str] = frozenset()
        self._bring_s = 0.0

    def see(self, view: MemoryView, now: float) -> None:
        """Take in what has come and gone; next to nothing where nothing has."""
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
        """Whether an adapter has been here for as long as it may while others are wanted."""
        return now - self._came_s.get(name, now) >= _WORTH * self._bring_s
