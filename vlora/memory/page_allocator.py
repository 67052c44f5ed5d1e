"""Page ownership in the arena. Bookkeeping only: no bytes, no policy.

::

    page   0                        limit of the runs                          num_pages
           | run A | run B |  free       :     free      | block | block | ... | block |
           +--- runs: any length,   ---> :     <--- blocks: `pages_per_block` pages, ---+
                lowest fit               :          highest free number first

An adapter occupies one contiguous *run* of pages at the low end. A KV *block* occupies `pages_per_block` pages,
aligned to its number: block b owns pages [b * pages_per_block, (b + 1) * pages_per_block). Blocks are allocated from
the high end and may use every free page, so the border between the two moves with demand. Runs stay below a limit
(see `AdapterCache`), so all pages above the limit are available to blocks.

A *cached* block has no users, but its content may be reused (`PrefixCache`). Its pages count as free. When no other
free pages fit, an allocation evicts cached blocks: a block evicts the least recently used one, a run those it overlaps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set
from typing import NamedTuple

_FREE, _RUN, _BLOCK, _CACHED = 0, 1, 2, 3
_CACHED_AS_FREE = bytes.maketrans(bytes([_CACHED]), bytes([_FREE]))


class PageRun(NamedTuple):
    """Pages [first_page, first_page + num_pages)."""

    first_page: int
    num_pages: int

    @property
    def end(self) -> int:
        return self.first_page + self.num_pages


class PageAllocator:
    """Page accounting: every page is in exactly one run, in exactly one block (taken or cached), or free.

    Args:
        on_evict: called with the number of each cached block that is evicted.
        copy: copies pages; called with (first page, target page, number of pages) before either range changes
            otherwise. The ranges may overlap.
    """

    def __init__(
        self,
        num_pages: int,
        pages_per_block: int,
        on_evict: Callable[[int], None] = lambda block: None,
        copy: Callable[[int, int, int], None] = lambda first, target, num_pages: None,
    ) -> None:
        assert num_pages >= pages_per_block >= 1
        self.num_pages = num_pages
        self.pages_per_block = pages_per_block
        self.num_blocks = num_pages // pages_per_block
        self._runs: set[PageRun] = set()
        self._taken: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._on_evict = on_evict
        self._copy = copy
        self._moved_callbacks: list[Callable[[int, int], None]] = []
        # Byte maps: a search is a memory scan in C, which is fast even with a million pages.
        self._pages = bytearray(num_pages)  # _FREE, _RUN, _BLOCK or _CACHED
        self._blocks = bytearray(self.num_blocks)  # _FREE if all pages of the block are free, else the kind of owner
        self._num_free_blocks = self.num_blocks

    @property
    def runs(self) -> frozenset[PageRun]:
        return frozenset(self._runs)

    @property
    def taken_blocks(self) -> frozenset[int]:
        return frozenset(self._taken)

    @property
    def cached_blocks(self) -> Set[int]:
        return self._cached.keys()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return self._num_free_blocks

    @property
    def page_kinds(self) -> bytes:
        """The kind of each page: free (0), in a run (1), in a block (2), in a cached block (3)."""
        return bytes(self._pages)

    def allocate_block(self) -> int | None:
        """Allocate the highest free block, else the least recently used cached one; None if there is neither."""
        block = self._blocks.rfind(_FREE)
        if block < 0:
            if not self._cached:
                return None
            block = next(iter(self._cached))
            self.evict_block(block)
        self._own(block)
        return block

    def free_block(self, block: int) -> None:
        assert block in self._taken, f"block {block} was not taken"
        self._taken.remove(block)
        self._blocks[block] = _FREE
        self._mark(self.pages_of(block), _FREE)
        self._num_free_blocks += 1

    def cache_block(self, block: int) -> None:
        """Free a block but keep its content until the pages are needed."""
        self.free_block(block)
        self._cached[block] = None
        self._blocks[block] = _CACHED
        self._mark(self.pages_of(block), _CACHED)

    def reuse_cached_block(self, block: int) -> None:
        self.free_cached_block(block)
        self._own(block)

    def free_cached_block(self, block: int) -> None:
        del self._cached[block]
        self._blocks[block] = _FREE
        self._mark(self.pages_of(block), _FREE)

    def allocate_run(self, num_pages: int, limit: int | None = None) -> PageRun | None:
        """Allocate the lowest gap of `num_pages` contiguous pages below page `limit`; None if there is no such gap.

        Evicts cached blocks if no gap is free without them.
        """
        assert num_pages >= 1
        wanted, stop = bytes(num_pages), self.num_pages if limit is None else limit
        first = self._pages.find(wanted, 0, stop)
        if first < 0 and self._cached:
            first = self._pages.translate(_CACHED_AS_FREE).find(wanted, 0, stop)
        if first < 0:
            return None
        run = PageRun(first, num_pages)
        for block in self._blocks_touched(run):
            if self._blocks[block] == _CACHED:
                self.evict_block(block)
        return self.allocate_at(run)

    def allocate_at(self, run: PageRun) -> PageRun:
        """Allocate exactly these pages, which must be free."""
        assert not any(self._pages[run.first_page : run.end]), f"a page of {run} is not free"
        self._runs.add(run)
        self._mark(run, _RUN)
        for block in self._blocks_touched(run):
            self._num_free_blocks -= self._blocks[block] == _FREE
            self._blocks[block] = _RUN
        return run

    def free_run(self, run: PageRun) -> None:
        assert run in self._runs, f"{run} was not allocated"
        self._runs.remove(run)
        self._mark(run, _FREE)
        for block in self._blocks_touched(run):
            pages = self.pages_of(block)
            if not any(self._pages[pages.first_page : pages.end]):  # a neighbouring run may still own some of them
                self._blocks[block] = _FREE
                self._num_free_blocks += 1

    # -- moving runs and blocks -----------------------------------------------------------------------------------

    def find_gap(self, num_pages: int, limit: int) -> int | None:
        """First page of the lowest gap of free, uncached pages; None if there is no such gap below `limit`."""
        first = self._pages.find(bytes(num_pages), 0, limit)
        return None if first < 0 else first

    def page_map(self) -> bytearray:
        """A copy of the page map: one byte per page, 0 if the page is free and not cached."""
        return bytearray(self._pages)

    def pages_of(self, block: int) -> PageRun:
        return PageRun(block * self.pages_per_block, self.pages_per_block)

    def on_block_moved(self, callback: Callable[[int, int], None]) -> None:
        """Register a callback for each moved block: called with (old number, new number)."""
        self._moved_callbacks.append(callback)

    def move_run(self, run: PageRun, first_page: int) -> PageRun:
        """Move a run and its content to a gap, which may overlap the old pages; return the new run."""
        self._copy(run.first_page, first_page, run.num_pages)
        self.free_run(run)
        return self.allocate_at(PageRun(first_page, run.num_pages))

    def move_block(self, block: int, target: int) -> None:
        """Move a block and its content to a free block number. A cached block keeps its LRU position."""
        self._copy(self.pages_of(block).first_page, self.pages_of(target).first_page, self.pages_per_block)
        if block in self._taken:
            self.free_block(block)
            self._own(target)
        else:
            order = [target if other == block else other for other in self._cached]
            self.free_cached_block(block)
            self._own(target)
            self.cache_block(target)
            self._cached = OrderedDict.fromkeys(order)
        for callback in self._moved_callbacks:
            callback(block, target)

    def evict_block(self, block: int) -> None:
        self.free_cached_block(block)
        self._on_evict(block)

    @property
    def ownership(self) -> Ownership:
        """A copy of the complete state."""
        return Ownership(
            self.pages_per_block,
            self.runs,
            self.taken_blocks,
            frozenset(self._cached),
            bytes(self._pages),
            bytes(self._blocks),
            self._num_free_blocks,
        )

    def check_integrity(self) -> None:
        """Assert that every page has exactly one owner and that the counters match."""
        check_ownership(self.ownership)

    def _own(self, block: int) -> None:
        assert self._blocks[block] == _FREE, f"block {block} is not free"
        self._taken.add(block)
        self._blocks[block] = _BLOCK
        self._mark(self.pages_of(block), _BLOCK)
        self._num_free_blocks -= 1

    def _mark(self, pages: PageRun, kind: int) -> None:
        self._pages[pages.first_page : pages.end] = bytes([kind]) * pages.num_pages

    def _blocks_touched(self, run: PageRun) -> range:
        last = min((run.end - 1) // self.pages_per_block + 1, self.num_blocks)
        return range(run.first_page // self.pages_per_block, last)


class Ownership(NamedTuple):
    """The state of a `PageAllocator`: the owners, and the byte maps and the counter derived from them.

    pages: the kind of each page. blocks: per block, free if all its pages are free, else the kind of their owner.
    """

    pages_per_block: int
    runs: frozenset[PageRun]
    taken_blocks: frozenset[int]
    cached_blocks: frozenset[int]
    pages: bytes
    blocks: bytes
    num_free_blocks: int


def check_ownership(state: Ownership) -> None:
    """Assert that every page has exactly one owner and that the byte maps and the counter match the owners."""

    def pages_of(block: int) -> PageRun:
        return PageRun(block * state.pages_per_block, state.pages_per_block)

    pages = bytearray(len(state.pages))
    owners = [(run, _RUN) for run in state.runs]
    owners += [(pages_of(block), _BLOCK) for block in state.taken_blocks]
    owners += [(pages_of(block), _CACHED) for block in state.cached_blocks]
    for owner, kind in owners:
        assert 0 <= owner.first_page < owner.end <= len(pages), f"{owner} is outside the arena"
        assert not any(pages[owner.first_page : owner.end]), f"a page of {owner} has two owners"
        pages[owner.first_page : owner.end] = bytes([kind]) * owner.num_pages
    assert pages == state.pages, "the page map differs from what the runs and blocks own"
    num_free = 0
    for block, kind in enumerate(state.blocks):
        own = pages_of(block)
        kinds = set(pages[own.first_page : own.end]) - {_FREE}
        assert kind == (kinds.pop() if kinds else _FREE), f"block {block} is marked wrongly"
        num_free += kind in (_FREE, _CACHED)
    assert num_free == state.num_free_blocks, f"{num_free} blocks are free, {state.num_free_blocks} counted"
