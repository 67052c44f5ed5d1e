"""Who owns which page of the arena. Books only: no bytes, no policy.

::

    page   0                        limit of the runs                          num_pages
           | run A | run B |  free       :     free      | block | block | ... | block |
           +--- runs: any length,   ---> :     <--- blocks: `pages_per_block` pages, ---+
                lowest fit               :          highest free number first

An adapter takes one contiguous *run* of pages at the low end. A KV *block* takes `pages_per_block` pages, aligned to
its number: block b owns pages [b * pages_per_block, (b + 1) * pages_per_block). Blocks are handed out from the high
end and may use every free page, so the border between the two moves with demand; runs stay below a limit (see
`Residency`), so what lies above it is always to be had for blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_FREE, _RUN, _BLOCK = 0, 1, 2


class Run(NamedTuple):
    """Pages [first_page, first_page + num_pages)."""

    first_page: int
    num_pages: int

    @property
    def end(self) -> int:
        return self.first_page + self.num_pages


class ArenaBooks:
    """Counts pages: every page is in exactly one run, in exactly one block, or free."""

    def __init__(self, num_pages: int, pages_per_block: int) -> None:
        assert num_pages >= pages_per_block >= 1
        self.num_pages = num_pages
        self.pages_per_block = pages_per_block
        self.num_blocks = num_pages // pages_per_block
        self._runs: set[Run] = set()
        self._taken: set[int] = set()
        # Byte maps: searching them is a memory scan in C, which stays quick with a million pages.
        self._pages = bytearray(num_pages)  # _FREE, _RUN or _BLOCK
        self._blocks = bytearray(self.num_blocks)  # _FREE when all pages of the block are, else who has some of them
        self._num_free_blocks = self.num_blocks

    @property
    def runs(self) -> frozenset[Run]:
        return frozenset(self._runs)

    @property
    def taken_blocks(self) -> frozenset[int]:
        return frozenset(self._taken)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be taken right now."""
        return self._num_free_blocks

    def take_block(self) -> int | None:
        """The highest free block, or None when there is none."""
        block = self._blocks.rfind(_FREE)
        if block < 0:
            return None
        self._taken.add(block)
        self._blocks[block] = _BLOCK
        self._mark(self._pages_of(block), _BLOCK)
        self._num_free_blocks -= 1
        return block

    def return_block(self, block: int) -> None:
        assert block in self._taken, f"block {block} was not taken"
        self._taken.remove(block)
        self._blocks[block] = _FREE
        self._mark(self._pages_of(block), _FREE)
        self._num_free_blocks += 1

    def allocate_run(self, num_pages: int, limit: int | None = None) -> Run | None:
        """The lowest gap of `num_pages` contiguous free pages below page `limit`, or None when there is no such gap."""
        assert num_pages >= 1
        first = self._pages.find(bytes(num_pages), 0, self.num_pages if limit is None else limit)
        if first < 0:
            return None
        run = Run(first, num_pages)
        self._runs.add(run)
        self._mark(run, _RUN)
        for block in self._blocks_touched(run):
            self._num_free_blocks -= self._blocks[block] == _FREE
            self._blocks[block] = _RUN
        return run

    def free_run(self, run: Run) -> None:
        assert run in self._runs, f"{run} was not allocated"
        self._runs.remove(run)
        self._mark(run, _FREE)
        for block in self._blocks_touched(run):
            pages = self._pages_of(block)
            if not any(self._pages[pages.first_page : pages.end]):  # a neighbouring run may still have some
                self._blocks[block] = _FREE
                self._num_free_blocks += 1

    def would_fit(self, num_pages: int, limit: int, freed: Iterable[Run]) -> bool:
        """Whether a run of `num_pages` could be allocated below page `limit` if the runs `freed` were gone."""
        pages = bytearray(self._pages)
        for run in freed:
            pages[run.first_page : run.end] = bytes(run.num_pages)
        return pages.find(bytes(num_pages), 0, limit) >= 0

    def check_integrity(self) -> None:
        """Prove that every page has exactly one place and that the sums add up."""
        pages = bytearray(self.num_pages)
        owners = [(run, _RUN) for run in self._runs] + [(self._pages_of(block), _BLOCK) for block in self._taken]
        for owner, kind in owners:
            assert 0 <= owner.first_page < owner.end <= self.num_pages, f"{owner} lies outside the arena"
            assert not any(pages[owner.first_page : owner.end]), f"a page of {owner} has two owners"
            pages[owner.first_page : owner.end] = bytes([kind]) * owner.num_pages
        assert pages == self._pages, "the page map differs from what the runs and blocks own"
        free = []
        for block in range(self.num_blocks):
            own = self._pages_of(block)
            kinds = set(pages[own.first_page : own.end]) - {_FREE}
            assert self._blocks[block] == (kinds.pop() if kinds else _FREE), f"block {block} is marked wrongly"
            if self._blocks[block] == _FREE:
                free.append(block)
        assert len(free) == self._num_free_blocks, f"{len(free)} blocks are free, {self._num_free_blocks} counted"

    def _mark(self, pages: Run, kind: int) -> None:
        self._pages[pages.first_page : pages.end] = bytes([kind]) * pages.num_pages

    def _pages_of(self, block: int) -> Run:
        return Run(block * self.pages_per_block, self.pages_per_block)

    def _blocks_touched(self, run: Run) -> range:
        last = min((run.end - 1) // self.pages_per_block + 1, self.num_blocks)
        return range(run.first_page // self.pages_per_block, last)


class BlockTables:
    """Each request's KV blocks, in token order."""

    def __init__(self, books: ArenaBooks, block_size: int) -> None:
        self.books = books
        self.block_size = block_size
        self._tables: dict[str, tuple[int, ...]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.books.num_free_blocks

    @property
    def total_blocks(self) -> int:
        return self.books.num_blocks

    @property
    def holders(self) -> frozenset[str]:
        """Requests that hold blocks."""
        return frozenset(self._tables)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> tuple[int, ...]:
        return self._tables.get(request_id, ())

    def missing(self, request_id: str, num_tokens: int) -> int:
        """How many more blocks would have to be free for `grow` to succeed; 0 when it would."""
        return max(0, self.blocks_for(num_tokens) - len(self.table(request_id)) - self.num_free_blocks)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Make the table hold `num_tokens`. All or nothing: False, and nothing changed, when blocks are short."""
        table = self.table(request_id)
        wanted = self.blocks_for(num_tokens) - len(table)
        if wanted <= 0:
            return True
        if wanted > self.num_free_blocks:
            return False
        self._tables[request_id] = table + tuple(self._take() for _ in range(wanted))
        return True

    def free(self, request_id: str) -> int:
        """Give back all of a request's blocks; returns how many."""
        table = self._tables.pop(request_id, ())
        for block in table:
            self.books.return_block(block)
        return len(table)

    def check_integrity(self) -> None:
        """Prove that the taken blocks are exactly those in the tables, each in one place of one table."""
        placed = [block for table in self._tables.values() for block in table]
        assert all(self._tables.values()), "a request without blocks is listed as a holder"
        assert len(placed) == len(set(placed)), "a block is in two places"
        assert set(placed) == self.books.taken_blocks, (
            f"{len(placed)} blocks are in tables, {len(self.books.taken_blocks)} are taken"
        )

    def _take(self) -> int:
        block = self.books.take_block()
        assert block is not None, "free blocks were counted but none could be taken"
        return block
