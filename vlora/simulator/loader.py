"""Simulated adapter loads: one at a time, concurrent with the steps."""

from __future__ import annotations

from collections.abc import Callable

from vlora.memory.adapter_cache import AdapterCache


class Loader:
    """Allocates an adapter's pages at once, as the engine does; it is usable after `load_s` seconds of copying."""

    def __init__(self, adapter_cache: AdapterCache, clock: Callable[[], float], load_s: float) -> None:
        self._adapter_cache = adapter_cache
        self._clock = clock
        self._load_s = load_s
        self._ready_s: dict[str, float] = {}  # by adapter being loaded, in order of arrival
        self._resident: frozenset[str] = frozenset()
        self.loading: frozenset[str] = frozenset()
        self.num_loads = 0

    @property
    def resident(self) -> frozenset[str]:
        """Adapters that a step may use. The same object until the set changes."""
        usable = self._adapter_cache.resident
        if not self.loading:
            return usable
        usable -= self.loading
        if usable != self._resident:
            self._resident = usable
        return self._resident

    @property
    def next_s(self) -> float | None:
        """When the next load ends; None without a running load."""
        return next(iter(self._ready_s.values()), None)

    def load(self, name: str, num_pages: int) -> bool:
        """Whether the adapter is resident or being loaded; False if it does not fit now."""
        known = name in self._adapter_cache.resident
        if self._adapter_cache.allocate(name, num_pages) is None:
            return False
        if not known:
            self.num_loads += 1
            if self._load_s > 0:
                self._adapter_cache.pin(name)
                copier_free_s = max([self._clock(), *self._ready_s.values()])
                self._ready_s[name] = copier_free_s + self._load_s
                self.loading = frozenset(self._ready_s)
        return True

    def collect(self) -> None:
        """Make loaded adapters usable."""
        for name in [name for name, ready_s in self._ready_s.items() if ready_s <= self._clock()]:
            self._adapter_cache.unpin(name)
            del self._ready_s[name]
            self.loading = frozenset(self._ready_s)
