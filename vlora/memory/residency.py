"""Which adapters are on the device: least recently used first out, pinned ones never. Books only."""

from __future__ import annotations

from collections import Counter, OrderedDict

from vlora.memory.books import ArenaBooks, Run


class Residency:
    """Adapter runs in the arena, at most `max_pages` pages together."""

    def __init__(self, books: ArenaBooks, max_pages: int) -> None:
        self.books = books
        self.max_pages = max_pages
        self._runs: OrderedDict[str, Run] = OrderedDict()  # least recently used first
        self._pins: Counter[str] = Counter()
        self._evicted: list[str] = []

    @property
    def resident(self) -> frozenset[str]:
        return frozenset(self._runs)

    @property
    def num_pages(self) -> int:
        return sum(run.num_pages for run in self._runs.values())

    def run(self, name: str) -> Run:
        return self._runs[name]

    def bring(self, name: str, num_pages: int) -> Run | None:
        """Find room for an adapter, evicting cold ones as far as needed; None when it cannot fit now.

        What was evicted on the way is in `drain_evicted()`, also when the answer is None.
        """
        if name in self._runs:
            self.touch(name)
            return self._runs[name]
        if num_pages > self.max_pages:
            return None
        while True:
            if self.num_pages + num_pages <= self.max_pages:
                run = self.books.allocate_run(num_pages)
                if run is not None:
                    self._runs[name] = run
                    return run
            coldest = next((other for other in self._runs if not self._pins[other]), None)
            if coldest is None:
                return None
            self.drop(coldest)
            self._evicted.append(coldest)

    def drain_evicted(self) -> tuple[str, ...]:
        """Names evicted since the last call."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def touch(self, name: str) -> None:
        """Mark as just used."""
        self._runs.move_to_end(name)

    def pin(self, name: str) -> None:
        """Keep from being evicted until unpinned as often as pinned."""
        self._pins[name] += 1

    def unpin(self, name: str) -> None:
        assert self._pins[name] > 0, f"{name} is not pinned"
        self._pins[name] -= 1

    def drop(self, name: str) -> None:
        """Free an adapter's pages."""
        self.books.free_run(self._runs.pop(name))

    def check_integrity(self) -> None:
        assert self.num_pages <= self.max_pages, f"adapters hold {self.num_pages} of {self.max_pages} pages"
        assert all(count >= 0 for count in self._pins.values())
