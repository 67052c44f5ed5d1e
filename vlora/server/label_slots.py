"""Bounded label values for metrics: the names with the most requests get their own."""

from __future__ import annotations

from collections.abc import Callable

from vlora.types.adapter_names import OTHER

_DECAY_EVERY = 4096  # requests
_CLEARLY = 2.0  # a name needs this many times the requests of a slot's name, so that similar names do not alternate


class LabelSlots:
    """Names that have a slot keep their own series; all other names count as `other`.

    A slot moves to a name with clearly more recent requests than the least busy name with a slot, and the series
    of that name ends. So every series only increases, and the number of series is bounded.
    """

    def __init__(self, limit: int, on_evict: Callable[[str], None]) -> None:
        """on_evict: called with each name that loses its slot."""
        self._limit = limit
        self._on_evict = on_evict
        self._recent: dict[str, float] = {}  # decayed request counts, of names with and without a slot
        self._slots: set[str] = set()
        self._requests = 0

    def reserve(self, name: str) -> bool:
        """Give a name a slot if one is free. Returns whether the name has one."""
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

    def current_label(self, name: str) -> str:
        """The label value of a name, without counting a request."""
        return name if name in self._slots else OTHER

    def _count(self, name: str) -> None:
        self._recent[name] = self._recent.get(name, 0.0) + 1
        self._requests += 1
        if self._requests % _DECAY_EVERY == 0:
            halved = {each: count / 2 for each, count in self._recent.items()}
            self._recent = {each: count for each, count in halved.items() if count >= 0.5}
