"""Plans that free contiguous pages by moving runs and blocks, with their cost.

`AdapterCache` chooses a plan and `PageAllocator` executes it.

A plan clears one window of the arena. First the runs in the window move, the largest first, each to the lowest gap
below the limit; the gap may overlap the pages that the run leaves. Then the KV blocks move to the highest free block
numbers. If no block is free, a block in use replaces the least recently used cached block, and a cached block in the
window is discarded.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterator
from typing import NamedTuple

from vlora.memory.page_allocator import PageAllocator, PageRun

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
