"""Which names get a label value of their own in metrics: a bounded number, those with most requests."""

from __future__ import annotations

from collections.abc import Callable

OTHER = "other"
_DECAY_EVERY = 4096  # requests
_CLEARLY = 2.0  # how much busier a name must be than one with a slot, so that two alike do not change places


class LabelSlots:
    """Names that have a slot keep their own series; all others are counted together as `other`.

    A slot goes to a name that has been clearly busier of late than the least busy one with a slot, whose series end. So
    every series only ever rises, and their number is bounded, however many names there are.
    """

    def __init__(self, limit: int, on_evict: Callable[[str], None]) -> None:
        """on_evict: called with each name that lost its slot."""
        self._limit = limit
        self._on_evict = on_evict
        self._recent: dict[str, float] = {}  # requests of late, of names with a slot and others
        self._slots: set[str] = set()
        self._requests = 0

    def reserve(self, name: str) -> bool:
        """Give a name a slot if one is free; whether it has one."""
        if name not in self._slots and len(self._slots) < self._limit:
            self._slots.add(name)
        return name in self._slots

    def label(self, name: str) -> str:
        """The label value for one more request of this name."""
        self._count(name)
        if self.reserve(name):
            return name
        least = min(self._slots, key=lambda each: self._recent.get(each, 0.0))
        if self._recent[name] < _CLEARLY * (self._recent.get(least, 0.0) + 1):
            return OTHER
        self._slots.remove(least)
        self._on_evict(least)
        self._slots.add(name)
        return name

    def shown(self, name: str) -> str:
        """The label value of a name, without counting a request."""
        return name if name in self._slots else OTHER

    def _count(self, name: str) -> None:
        self._recent[name] = self._recent.get(name, 0.0) + 1
        self._requests += 1
        if self._requests % _DECAY_EVERY == 0:
            halved = {each: count / 2 for each, count in self._recent.items()}
            self._recent = {each: count for each, count in halved.items() if count >= 0.5}
