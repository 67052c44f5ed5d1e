"""How room for a run of pages can be made by moving what lies there, and what that costs. Plans only: `Residency`
chooses one and `ArenaBooks` carries it out.

A plan clears one window of the arena. What lies in it goes elsewhere, one after the other: first runs, the largest
first, to the lowest gap below the limit, which may overlap the place they leave; then KV blocks, to the highest free
numbers. Where no block is free, one in use takes the place of the least recently used cached one, and one that is only
cached is forgotten.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterator
from typing import NamedTuple

from vlora.memory.books import ArenaBooks, Run

_MOST_TRIES = 8  # windows, the cheapest first: one that is hard to clear is not worth a step's time


class Plan(NamedTuple):
    """What to do, in this order: forgotten, cached blocks that are given up; runs and blocks, each with where it goes
    (first page, number). num_pages: how many are copied, which is what the plan costs: cached blocks count as free,
    here as everywhere. first_page: of the window.
    """

    first_page: int
    forgotten: tuple[int, ...]
    runs: tuple[tuple[Run, int], ...]
    blocks: tuple[tuple[int, int], ...]
    num_pages: int


def plan_room(
    books: ArenaBooks, num_pages: int, limit: int, movable: Collection[Run], gone: Collection[Run] = ()
) -> Plan | None:
    """The cheapest way found to have `num_pages` in a row free below page `limit`; None where there is none.

    movable: runs that may go elsewhere; all others stay where they are. gone: runs to be seen as freed already.
    """
    pages = books.page_map()
    for run in gone:
        pages[run.first_page : run.end] = bytes(run.num_pages)
    if (gap := pages.find(bytes(num_pages), 0, limit)) >= 0:
        return Plan(gap, (), (), (), 0)
    movable = set(movable).difference(gone)
    items = [_Item(run, None, run in movable) for run in books.runs.difference(gone)]
    items += [
        _Item(books.pages_of(block), block, True)
        for block in itertools.chain(books.taken_blocks, books.cached_blocks)
        if books.pages_of(block).first_page < limit
    ]
    items.sort(key=lambda item: item.run)
    for first_page in itertools.islice(_windows(items, num_pages, limit), _MOST_TRIES):
        plan = _clear(books, bytearray(pages), items, Run(first_page, num_pages), limit)
        if plan is not None:
            return plan
    return None


class _Item(NamedTuple):
    """What lies in the arena: a run, or the block of that number."""

    run: Run
    block: int | None
    movable: bool

    def overlaps(self, window: Run) -> bool:
        return self.run.first_page < window.end and window.first_page < self.run.end


def _windows(items: list[_Item], num_pages: int, limit: int) -> Iterator[int]:
    """First pages of the windows without anything that stays, those with the fewest pages to move first.

    Of windows that hold the same items, one that begins where an item ends, or ends where one begins, stands for all.
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


def _clear(books: ArenaBooks, pages: bytearray, items: list[_Item], window: Run, limit: int) -> Plan | None:
    """Find a place for everything in the window. pages: what is free as the plan goes on; it is written to."""
    inside = [item for item in items if item.overlaps(window)]

    def mark(run: Run, kind: int) -> None:
        pages[run.first_page : run.end] = bytes([kind]) * run.num_pages
        pages[window.first_page : window.end] = b"\xff" * window.num_pages  # nothing may go there

    mark(window, 0xFF)
    runs: list[tuple[Run, int]] = []
    for run in sorted((item.run for item in inside if item.block is None), key=lambda run: -run.num_pages):
        mark(run, 0)
        target = pages.find(bytes(run.num_pages), 0, limit)
        if target < 0:
            return None
        mark(Run(target, run.num_pages), 0xFF)
        runs.append((run, target))
    moving = [item.block for item in inside if item.block is not None]
    free = (block for block in range(books.num_blocks - 1, -1, -1) if not any(_part(pages, books.pages_of(block))))
    cold = (block for block in books.cached_blocks if block not in moving)
    forgotten: list[int] = []
    blocks: list[tuple[int, int]] = []
    for block in sorted(moving, key=books.cached_blocks.__contains__):  # those in use choose first
        place = next(free, None)
        if place is None and block not in books.cached_blocks:
            place = next(cold, None)
            if place is None:
                return None
            forgotten.append(place)
        if place is None:
            forgotten.append(block)
        else:
            blocks.append((block, place))
    num_pages = sum(run.num_pages for run, _ in runs) + len(blocks) * books.pages_per_block
    return Plan(window.first_page, tuple(forgotten), tuple(runs), tuple(blocks), num_pages)


def _part(pages: bytearray, run: Run) -> bytearray:
    return pages[run.first_page : run.end]
