"""Who owns which page of the arena. Books only: no bytes, no policy.

::

    page   0                                                                   num_pages
           | adapter run | adapter run |      free      | block | block | ... | block |
           +--- runs: any length, lowest fit --->  <--- blocks: `pages_per_block` pages ---+

An adapter takes one contiguous *run* of pages from the low end. A KV *block* takes `pages_per_block` pages, aligned to its
number: block b owns pages [b * pages_per_block, (b + 1) * pages_per_block). Blocks are handed out from the high end, so the
border between the two moves with demand.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple


class Run(NamedTuple):
    """Pages [first_page, first_page + num_pages)."""

    first_page: int
    num_pages: int

    @property
    def end(self) -> int:
        return self.first_page + self.num_pages


class ArenaBooks:
    """Counts pages: every page is in exactly one run, one block, or free."""

    def __init__(self, num_pages: int, pages_per_block: int) -> None:
        assert num_pages >= pages_per_block >= 1
        self.num_pages = num_pages
        self.pages_per_block = pages_per_block
        self.num_blocks = num_pages // pages_per_block
        self._runs: list[Run] = []  # sorted by first page
        self._taken: set[int] = set()
        # Free block numbers as a heap of negatives (highest first). Blocks covered by runs are skipped when they surface
        # and put back when the run goes.
        self._free: list[int] = [-block for block in range(self.num_blocks)]
        heapq.heapify(self._free)
        self._covered: dict[int, int] = {}  # block -> how many runs touch it

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be taken right now."""
        return self.num_blocks - len(self._taken) - len(self._covered)

    def take_block(self) -> int | None:
        """The highest free block, or None when there is none."""
        while self._free:
            block = -heapq.heappop(self._free)
            if block not in self._covered and block not in self._taken:
                self._taken.add(block)
                return block
        return None

    def return_block(self, block: int) -> None:
        assert block in self._taken, f"block {block} was not taken"
        self._taken.remove(block)
        heapq.heappush(self._free, -block)

    def allocate_run(self, num_pages: int) -> Run | None:
        """The lowest gap of `num_pages` contiguous free pages, or None when there is no such gap."""
        assert num_pages >= 1
        start = 0
        for obstacle in self._obstacles():
            if obstacle.first_page - start >= num_pages:
                break
            start = max(start, obstacle.end)
        if start + num_pages > self.num_pages:
            return None
        run = Run(start, num_pages)
        self._runs.append(run)
        self._runs.sort()
        for block in self._blocks_of(run):
            self._covered[block] = self._covered.get(block, 0) + 1
        return run

    def free_run(self, run: Run) -> None:
        self._runs.remove(run)
        for block in self._blocks_of(run):
            self._covered[block] -= 1
            if not self._covered[block]:
                del self._covered[block]
                heapq.heappush(self._free, -block)

    def check_integrity(self) -> None:
        """Prove that no page has two owners and that the counts add up."""
        owner: dict[int, str] = {}
        for run in self._runs:
            for page in range(run.first_page, run.end):
                assert page not in owner, f"page {page} is in {owner[page]} and in {run}"
                owner[page] = str(run)
        for block in self._taken:
            for page in range(block * self.pages_per_block, (block + 1) * self.pages_per_block):
                assert page not in owner, f"page {page} is in {owner[page]} and in block {block}"
                owner[page] = f"block {block}"
        assert all(0 <= page < self.num_pages for page in owner)
        reachable = {-entry for entry in self._free} - self._taken - set(self._covered)
        assert len(reachable) == self.num_free_blocks, f"{len(reachable)} free blocks listed, {self.num_free_blocks} counted"

    def _obstacles(self) -> list[Run]:
        blocks = (Run(block * self.pages_per_block, self.pages_per_block) for block in self._taken)
        return sorted((*self._runs, *blocks))

    def _blocks_of(self, run: Run) -> range:
        last = min((run.end - 1) // self.pages_per_block + 1, self.num_blocks)
        return range(run.first_page // self.pages_per_block, last)


class BlockTables:
    """Each request's KV blocks, in token order."""

    def __init__(self, books: ArenaBooks, block_size: int) -> None:
        self.books = books
        self.block_size = block_size
        self._tables: dict[str, list[int]] = {}

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
        return tuple(self._tables.get(request_id, ()))

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Make the table hold `num_tokens`. All or nothing: False, and nothing changed, when blocks are short."""
        table = self._tables.get(request_id, [])
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return True
        if missing > self.num_free_blocks:
            return False
        for _ in range(missing):
            block = self.books.take_block()
            assert block is not None, "free blocks were counted but none could be taken"
            table.append(block)
        self._tables[request_id] = table
        return True

    def free(self, request_id: str) -> int:
        """Give back all of a request's blocks; returns how many."""
        table = self._tables.pop(request_id, [])
        for block in table:
            self.books.return_block(block)
        return len(table)

    def check_integrity(self) -> None:
        """Prove that no block is in two tables."""
        seen: set[int] = set()
        for request_id, table in self._tables.items():
            for block in table:
                assert block not in seen, f"block {block} of request {request_id} is in another table too"
                seen.add(block)
        assert len(seen) + self.num_free_blocks <= self.total_blocks
