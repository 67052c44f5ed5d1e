"""Resident adapters, evicted in LRU order; pinned adapters are never evicted. Page bookkeeping only, no bytes."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Set
from typing import NamedTuple

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


_MOST_TRIES = 8  # windows tried, cheapest first; further ones do not justify the time within a step


class CompactionPlan(NamedTuple):
    """Moves to execute, in this order: `evicted`, `runs`, `blocks`.

    Attributes:
        first_page: first page of the window.
        evicted: cached blocks to discard.
        runs: each run with its new first page.
        num_pages: pages to copy, which is the cost of the plan. Cached blocks count as free.
    """

    first_page: int
    evicted: tuple[int, ...]
    runs: tuple[tuple[PageRun, int], ...]
    blocks: tuple[tuple[int, int], ...]
    num_pages: int


def plan_compaction(
    allocator: PageAllocator, num_pages: int, limit: int, movable: Collection[PageRun], freed: Collection[PageRun] = ()
) -> CompactionPlan | None:
    """The cheapest plan found that frees `num_pages` contiguous pages below page `limit`; None if there is none.

    A plan clears one window of the arena. First the runs in the window move, the largest first, each to the lowest gap
    below the limit; the gap may overlap the pages that the run leaves. Then the KV blocks move to the highest free
    block numbers. If no block is free, a block in use replaces the least recently used cached block, and a cached block
    in the window is discarded.

    Args:
        allocator: the arena's pages; not modified.
        limit: end of the adapters' share.
        movable: runs that may move; all others stay.
        freed: runs to treat as already freed.
    """
    pages = allocator.page_map()
    for run in freed:
        pages[run.first_page : run.end] = bytes(run.num_pages)
    if (gap := pages.find(bytes(num_pages), 0, limit)) >= 0:
        return CompactionPlan(gap, (), (), (), 0)
    movable = set(movable).difference(freed)
    items = [_Item(run, None, run in movable) for run in allocator.runs.difference(freed)]
    items += [
        _Item(allocator.pages_of(block), block, True)
        for block in itertools.chain(allocator.taken_blocks, allocator.cached_blocks)
        if allocator.pages_of(block).first_page < limit
    ]
    items.sort(key=lambda item: item.run)
    for first_page in itertools.islice(_windows(items, num_pages, limit), _MOST_TRIES):
        plan = _clear(allocator, bytearray(pages), items, PageRun(first_page, num_pages), limit)
        if plan is not None:
            return plan
    return None


class _Item(NamedTuple):
    run: PageRun
    block: int | None
    movable: bool

    def overlaps(self, window: PageRun) -> bool:
        return self.run.first_page < window.end and window.first_page < self.run.end


def _windows(items: list[_Item], num_pages: int, limit: int) -> Iterator[int]:
    """First pages of the windows without fixed runs, fewest pages to move first.

    Among windows that contain the same items, only those that start or end at an item's edge are considered.
    """
    edges = {0, limit - num_pages}
    edges.update(item.run.end for item in items)
    edges.update(item.run.first_page - num_pages for item in items)
    firsts, ends = [item.run.first_page for item in items], [item.run.end for item in items]
    pages_before = list(itertools.accumulate((item.run.num_pages for item in items), initial=0))
    staying_before = list(itertools.accumulate((not item.movable for item in items), initial=0))
    costs: list[tuple[int, int]] = []
    for first_page in edges:
        if 0 <= first_page <= limit - num_pages:
            low, high = bisect.bisect_right(ends, first_page), bisect.bisect_left(firsts, first_page + num_pages)
            if staying_before[low] == staying_before[high]:
                costs.append((pages_before[high] - pages_before[low], first_page))
    return (first_page for _, first_page in sorted(costs))


def _clear(
    allocator: PageAllocator, pages: bytearray, items: list[_Item], window: PageRun, limit: int
) -> CompactionPlan | None:
    """Find a new place for each item in the window. `pages` is the working page map and is modified."""
    inside = [item for item in items if item.overlaps(window)]

    def mark(run: PageRun, kind: int) -> None:
        pages[run.first_page : run.end] = bytes([kind]) * run.num_pages
        pages[window.first_page : window.end] = b"\xff" * window.num_pages  # nothing may move into the window

    mark(window, 0xFF)
    runs: list[tuple[PageRun, int]] = []
    for run in sorted((item.run for item in inside if item.block is None), key=lambda run: -run.num_pages):
        mark(run, 0)
        target = pages.find(bytes(run.num_pages), 0, limit)
        if target < 0:
            return None
        mark(PageRun(target, run.num_pages), 0xFF)
        runs.append((run, target))
    moving = [item.block for item in inside if item.block is not None]
    free = (
        block
        for block in range(allocator.num_blocks - 1, -1, -1)
        if not any(_pages_in(pages, allocator.pages_of(block)))
    )
    cold = (block for block in allocator.cached_blocks if block not in moving)
    evicted: list[int] = []
    blocks: list[tuple[int, int]] = []
    # Blocks in use take precedence over cached ones.
    for block in sorted(moving, key=allocator.cached_blocks.__contains__):
        place = next(free, None)
        if place is None and block not in allocator.cached_blocks:
            place = next(cold, None)
            if place is None:
                return None
            evicted.append(place)
        if place is None:
            evicted.append(block)
        else:
            blocks.append((block, place))
    num_pages = sum(run.num_pages for run, _ in runs) + len(blocks) * allocator.pages_per_block
    return CompactionPlan(window.first_page, tuple(evicted), tuple(runs), tuple(blocks), num_pages)


def _pages_in(pages: bytearray, run: PageRun) -> bytearray:
    return pages[run.first_page : run.end]
