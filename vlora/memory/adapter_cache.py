"""Resident adapters, evicted in LRU order; pinned adapters are never evicted. Page bookkeeping only, no bytes."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Set

from vlora.memory.compaction import CompactionPlan, plan_compaction
from vlora.memory.page_allocator import PageAllocator, PageRun

_MOVED = 2  # cost of moving a page, relative to a page of an evicted adapter


class AdapterCache:
    """Adapter runs in the arena, all of them below page `max_pages`.

    The adapters' share is a fixed page limit, not only a page count. Runs scattered over the KV side could each make a
    whole KV block unusable, and the number of blocks available to a request could not be guaranteed.
    """

    def __init__(self, allocator: PageAllocator, max_pages: int) -> None:
        assert 0 <= max_pages <= allocator.num_pages
        self.allocator = allocator
        self.max_pages = max_pages
        self._runs: OrderedDict[str, PageRun] = OrderedDict()  # least recently used first
        self._reserved: set[PageRun] = set()
        self._pins: Counter[str] = Counter()
        self._evicted: list[str] = []
        self._moved: list[str] = []
        self._room: int | None = None  # bound on contiguous pages between fixed runs; None until an allocation fails
        self._resident: frozenset[str] | None = frozenset()  # None: recompute on the next access

    @property
    def resident(self) -> frozenset[str]:
        """Resident adapter names. The same object is returned until an adapter is loaded or evicted."""
        if self._resident is None:
            self._resident = frozenset(self._runs)
        return self._resident

    @property
    def num_pages(self) -> int:
        return sum(run.num_pages for run in (*self._runs.values(), *self._reserved))

    def run(self, name: str) -> PageRun:
        return self._runs[name]

    @property
    def runs(self) -> tuple[tuple[str | None, PageRun], ...]:
        """Every run with its adapter name; the name is None for reserved runs."""
        return (*self._runs.items(), *((None, run) for run in self._reserved))

    def allocate(self, name: str, num_pages: int) -> PageRun | None:
        """Allocate a run for an adapter; return None if it cannot fit now.

        Moves unpinned runs and KV blocks and evicts cold adapters as needed. On failure nothing is moved or evicted.
        Afterwards `drain_evicted()` returns the evicted names and `drain_moved()` the names of moved adapters.
        """
        if name in self._runs:
            self.touch(name)
            return self._runs[name]
        first_page = self._make_room(num_pages)
        if first_page is None:
            return None
        run = self.allocator.allocate_at(PageRun(first_page, num_pages))
        self._runs[name] = run
        self._resident = None
        return run

    def drain_evicted(self) -> tuple[str, ...]:
        """Return the names evicted since the last call."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def drain_moved(self) -> tuple[str, ...]:
        """Return the names of adapters moved since the last call. Their content is already at the new run."""
        moved, self._moved = tuple(self._moved), []
        return moved

    def evict_for_blocks(self, num_blocks: int, kept: Set[str | None]) -> None:
        """Evict adapters until `num_blocks` more KV blocks are free, or no candidate is left.

        Candidates are adapters that are neither pinned nor in `kept`, least recently used first. `drain_evicted()`
        returns the evicted names.
        """
        wanted = self.allocator.num_free_blocks + num_blocks
        for name in [name for name in self._runs if name not in kept and name not in self.pinned]:
            if self.allocator.num_free_blocks >= wanted:
                break
            self.free(name)
            self._evicted.append(name)

    def reserve(self, num_pages: int) -> PageRun | None:
        """Reserve pages in the adapters' share for derived data, such as a packed copy. Never evicts."""
        run = self.allocator.allocate_run(num_pages, self.max_pages)
        if run is not None:
            self._reserved.add(run)
        return run

    def release(self, run: PageRun) -> None:
        self._reserved.remove(run)
        self._room = None
        self.allocator.free_run(run)

    def room_beside(self, kept: Iterable[PageRun]) -> int:
        """Longest run of contiguous pages that is free once all runs except `kept` are evicted."""
        edges = [(0, 0), *sorted((run.first_page, run.end) for run in kept), (self.max_pages, self.max_pages)]
        return max(start - end for (_, end), (start, _) in itertools.pairwise(edges))

    def room_without(self, reserved: PageRun) -> int:
        """Longest run of contiguous pages that could be freed after releasing `reserved`, KV blocks included."""
        return self.room_beside(self._fixed_runs - {reserved})

    def touch(self, name: str) -> None:
        """Mark an adapter as most recently used."""
        self._runs.move_to_end(name)

    def pin(self, name: str) -> None:
        """Prevent a resident adapter from being evicted or moved. Each `pin` needs one `unpin`."""
        assert name in self._runs, f"{name} is not resident"
        self._pins[name] += 1

    def unpin(self, name: str) -> None:
        assert self._pins[name] > 0, f"{name} is not pinned"
        self._pins[name] -= 1
        if not self._pins[name]:
            del self._pins[name]
            self._room = None

    def move(self, name: str, first_page: int) -> None:
        """Move an adapter, which must not be pinned, to a gap, which may overlap its old pages."""
        assert not self._pins[name], f"{name} is pinned {self._pins[name]} times"
        self._runs[name] = self.allocator.move_run(self._runs[name], first_page)
        self._moved.append(name)

    def free(self, name: str) -> None:
        """Free the pages of an adapter, which must not be pinned."""
        assert not self._pins[name], f"{name} is pinned {self._pins[name]} times"
        self.allocator.free_run(self._runs.pop(name))
        self._resident = None

    @property
    def pinned(self) -> Set[str]:
        """Resident adapters that may be neither evicted nor moved."""
        return self._pins.keys()

    @property
    def _fixed_runs(self) -> set[PageRun]:
        return {*self._reserved, *(self._runs[name] for name in self.pinned)}

    def _make_room(self, num_pages: int) -> int | None:
        """Free `num_pages` contiguous pages; return the first page, or None with nothing changed.

        Room is made by moving unpinned runs and blocks, by evicting adapters, or by both. The cost of a plan is the
        number of pages copied now, plus half the number of evicted pages, since an evicted adapter may have to be
        loaded again. The cheapest plan is used; on a tie, the one that evicts less.
        """
        if (gap := self.allocator.find_gap(num_pages, self.max_pages)) is not None:
            return gap
        if self._room is not None and self._room < num_pages:
            return None
        cold = [name for name in self._runs if name not in self.pinned]
        movable = [self._runs[name] for name in cold]
        if plan_compaction(self.allocator, num_pages, self.max_pages, movable, movable) is None:
            # Pinning more adapters cannot enlarge this bound. It avoids a search per adapter when hundreds fail in one
            # step.
            self._room = self.room_beside(self._fixed_runs)
            return None
        best: tuple[int, int, CompactionPlan] | None = None  # cost in pages, number of evicted adapters, plan
        num_evicted = held = 0
        held_by_runs = sum(run.num_pages for run in self.allocator.runs)
        while best is None or num_evicted < best[0]:
            freed = movable[:held]
            if held_by_runs - num_evicted + num_pages <= self.max_pages:
                plan = plan_compaction(self.allocator, num_pages, self.max_pages, movable, freed)
                if plan is not None and (best is None or num_evicted + _MOVED * plan.num_pages < best[0]):
                    best = num_evicted + _MOVED * plan.num_pages, held, plan
            if held == len(cold):
                break
            num_evicted += movable[held].num_pages
            held += 1
        if best is None:
            return None
        _, held, plan = best
        for name in cold[:held]:
            self.free(name)
            self._evicted.append(name)
        self._execute(plan)
        return plan.first_page

    def _execute(self, plan: CompactionPlan) -> None:
        names = {run: name for name, run in self._runs.items()}
        for block in plan.evicted:
            self.allocator.evict_block(block)
        for run, first_page in plan.runs:
            self.move(names[run], first_page)
        for block, target in plan.blocks:
            self.allocator.move_block(block, target)

    def check_integrity(self) -> None:
        """Assert that the arena's runs are exactly the adapters' and reserved runs, all within the adapters' share."""
        held = [*self._runs.values(), *self._reserved]
        assert len(held) == len(set(held)), "two adapters share a run"
        assert set(held) == self.allocator.runs, (
            f"{len(held)} runs are held, PageAllocator lists {len(self.allocator.runs)}"
        )
        assert all(run.end <= self.max_pages for run in held), f"a run ends beyond page {self.max_pages}"
        assert all(count > 0 and name in self._runs for name, count in self._pins.items()), "pinned but not resident"
        assert self._room is None or self._room >= self.room_beside(self._fixed_runs), "the room bound is too low"


class WorkerAdapterCache:
    """`AdapterCache` interface for worker ranks: rank 0 decides where each adapter is placed and when it is evicted."""

    def __init__(self) -> None:
        self._runs: dict[str, PageRun] = {}

    def place(self, name: str, run: PageRun) -> None:
        self._runs[name] = run

    def allocate(self, name: str, num_pages: int) -> PageRun:
        run = self._runs[name]
        assert run.num_pages == num_pages, f"{name} takes {num_pages} pages here and {run.num_pages} on rank 0"
        return run

    def run(self, name: str) -> PageRun:
        return self._runs[name]

    def free(self, name: str) -> None:
        del self._runs[name]

    def drain_evicted(self) -> tuple[str, ...]:
        return ()

    def drain_moved(self) -> tuple[str, ...]:
        return ()

    def reserve(self, num_pages: int) -> PageRun | None:
        """Always None: rank 0 decides where packed copies are placed."""
        return None

    def release(self, run: PageRun) -> None: ...

    def room_without(self, reserved: PageRun) -> int:
        raise AssertionError("nothing was reserved")

    def touch(self, name: str) -> None: ...

    def pin(self, name: str) -> None: ...

    def unpin(self, name: str) -> None: ...
