"""Page ownership in the arena. Bookkeeping only: no bytes, no policy.

::

    page   0                        limit of the runs                          num_pages
           | run A | run B |  free       :     free      | block | block | ... | block |
           +--- runs: any length,   ---> :     <--- blocks: `pages_per_block` pages, ---+
                lowest fit               :          highest free number first

An adapter occupies one contiguous *run* of pages at the low end. A KV *block* occupies `pages_per_block` pages,
aligned to its number: block b owns pages [b * pages_per_block, (b + 1) * pages_per_block). Blocks are allocated from
the high end and may use every free page, so the border between the two moves with demand. Runs stay below a limit
(see `Residency`), so all pages above the limit are available to blocks.

A *cached* block has no users, but its content may be reused (`PrefixCache`). Its pages count as free. When no other
free pages fit, an allocation evicts cached blocks: a block evicts the least recently used one, a run those it overlaps.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Set
from typing import NamedTuple

from vlora.memory.prefix_cache import Key, PrefixCache, TokenChain
from vlora.types import Request

_FREE, _RUN, _BLOCK, _CACHED = 0, 1, 2, 3
_CACHED_AS_FREE = bytes.maketrans(bytes([_CACHED]), bytes([_FREE]))


class Run(NamedTuple):
    """Pages [first_page, first_page + num_pages)."""

    first_page: int
    num_pages: int

    @property
    def end(self) -> int:
        return self.first_page + self.num_pages


class ArenaBooks:
    """Page accounting: every page is in exactly one run, in exactly one block (taken or cached), or free.

    Args:
        num_pages: pages of the arena.
        pages_per_block: pages of one KV block.
        displaced: called with the number of each cached block that is evicted.
        copy: copies pages; called with (first page, target page, number of pages) before either range changes
            otherwise. The ranges may overlap.
    """

    def __init__(
        self,
        num_pages: int,
        pages_per_block: int,
        displaced: Callable[[int], None] = lambda block: None,
        copy: Callable[[int, int, int], None] = lambda first, target, num_pages: None,
    ) -> None:
        assert num_pages >= pages_per_block >= 1
        self.num_pages = num_pages
        self.pages_per_block = pages_per_block
        self.num_blocks = num_pages // pages_per_block
        self._runs: set[Run] = set()
        self._taken: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._displaced = displaced
        self._copy = copy
        self._renamed: list[Callable[[int, int], None]] = []
        # Byte maps: a search is a memory scan in C, which is fast even with a million pages.
        self._pages = bytearray(num_pages)  # _FREE, _RUN, _BLOCK or _CACHED
        self._blocks = bytearray(self.num_blocks)  # _FREE if all pages of the block are free, else the kind of owner
        self._num_free_blocks = self.num_blocks

    @property
    def runs(self) -> frozenset[Run]:
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

    def take_block(self) -> int | None:
        """Allocate the highest free block, else the least recently used cached one; None if there is neither."""
        block = self._blocks.rfind(_FREE)
        if block < 0:
            if not self._cached:
                return None
            block = next(iter(self._cached))
            self.displace(block)
        self._own(block)
        return block

    def return_block(self, block: int) -> None:
        assert block in self._taken, f"block {block} was not taken"
        self._taken.remove(block)
        self._blocks[block] = _FREE
        self._mark(self.pages_of(block), _FREE)
        self._num_free_blocks += 1

    def cache_block(self, block: int) -> None:
        """Free a block but keep its content until the pages are needed."""
        self.return_block(block)
        self._cached[block] = None
        self._blocks[block] = _CACHED
        self._mark(self.pages_of(block), _CACHED)

    def take_cached_block(self, block: int) -> None:
        """Allocate a given cached block and keep its content."""
        self.free_cached_block(block)
        self._own(block)

    def free_cached_block(self, block: int) -> None:
        """Discard the content of a cached block and make it a free block."""
        del self._cached[block]
        self._blocks[block] = _FREE
        self._mark(self.pages_of(block), _FREE)

    def allocate_run(self, num_pages: int, limit: int | None = None) -> Run | None:
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
        run = Run(first, num_pages)
        for block in self._blocks_touched(run):
            if self._blocks[block] == _CACHED:
                self.displace(block)
        return self.take_run(run)

    def take_run(self, run: Run) -> Run:
        """Allocate exactly these pages, which must be free."""
        assert not any(self._pages[run.first_page : run.end]), f"a page of {run} is not free"
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

    def pages_of(self, block: int) -> Run:
        """The pages that a block number covers."""
        return Run(block * self.pages_per_block, self.pages_per_block)

    def on_renamed(self, told: Callable[[int, int], None]) -> None:
        """Register a callback for each moved block: called with (old number, new number)."""
        self._renamed.append(told)

    def move_run(self, run: Run, first_page: int) -> Run:
        """Move a run and its content to a gap, which may overlap the old pages; return the new run."""
        self._copy(run.first_page, first_page, run.num_pages)
        self.free_run(run)
        return self.take_run(Run(first_page, run.num_pages))

    def move_block(self, block: int, target: int) -> None:
        """Move a block and its content to a free block number. A cached block keeps its LRU position."""
        self._copy(self.pages_of(block).first_page, self.pages_of(target).first_page, self.pages_per_block)
        if block in self._taken:
            self.return_block(block)
            self._own(target)
        else:
            order = [target if other == block else other for other in self._cached]
            self.free_cached_block(block)
            self._own(target)
            self.cache_block(target)
            self._cached = OrderedDict.fromkeys(order)
        for told in self._renamed:
            told(block, target)

    def displace(self, block: int) -> None:
        """Evict a cached block."""
        self.free_cached_block(block)
        self._displaced(block)

    def check_integrity(self) -> None:
        """Assert that every page has exactly one owner and that the counters match."""
        pages = bytearray(self.num_pages)
        owners = [(run, _RUN) for run in self._runs]
        owners += [(self.pages_of(block), _BLOCK) for block in self._taken]
        owners += [(self.pages_of(block), _CACHED) for block in self._cached]
        for owner, kind in owners:
            assert 0 <= owner.first_page < owner.end <= self.num_pages, f"{owner} is outside the arena"
            assert not any(pages[owner.first_page : owner.end]), f"a page of {owner} has two owners"
            pages[owner.first_page : owner.end] = bytes([kind]) * owner.num_pages
        assert pages == self._pages, "the page map differs from what the runs and blocks own"
        free = []
        for block in range(self.num_blocks):
            own = self.pages_of(block)
            kinds = set(pages[own.first_page : own.end]) - {_FREE}
            assert self._blocks[block] == (kinds.pop() if kinds else _FREE), f"block {block} is marked wrongly"
            if self._blocks[block] in (_FREE, _CACHED):
                free.append(block)
        assert len(free) == self._num_free_blocks, f"{len(free)} blocks are free, {self._num_free_blocks} counted"

    def _own(self, block: int) -> None:
        assert self._blocks[block] == _FREE, f"block {block} is not free"
        self._taken.add(block)
        self._blocks[block] = _BLOCK
        self._mark(self.pages_of(block), _BLOCK)
        self._num_free_blocks -= 1

    def _mark(self, pages: Run, kind: int) -> None:
        self._pages[pages.first_page : pages.end] = bytes([kind]) * pages.num_pages

    def _blocks_touched(self, run: Run) -> range:
        last = min((run.end - 1) // self.pages_per_block + 1, self.num_blocks)
        return range(run.first_page // self.pages_per_block, last)


class BlockTables:
    """The KV blocks of each request, in token order. With a prefix cache, requests with a common prefix share blocks.

    Shared and known blocks are full and read-only: a request writes only to the blocks after them.
    """

    def __init__(self, books: ArenaBooks, block_size: int, prefix: PrefixCache | None = None) -> None:
        self.books = books
        self.block_size = block_size
        self._prefix = prefix
        self._tables: dict[str, tuple[int, ...]] = {}
        self._num_users: Counter[int] = Counter()
        books.on_renamed(self._rename)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self.books.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without users that keep their content."""
        return len(self.books.cached_blocks)

    @property
    def num_taken_blocks(self) -> int:
        """Blocks that requests hold, each counted once."""
        return len(self._num_users)

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

    def num_users(self, block: int) -> int:
        """The number of requests that hold a block."""
        return self._num_users[block]

    def num_own(self, request_id: str) -> int:
        """The number of blocks that only this request holds."""
        table = self.table(request_id)
        if self._prefix is None:
            return len(table)
        return sum([self._num_users[block] == 1 for block in table])

    def missing(self, request_id: str, num_tokens: int) -> int:
        """The number of additional free blocks that `grow` needs to succeed; 0 if it would succeed."""
        return max(0, self.blocks_for(num_tokens) - len(self.table(request_id)) - self.num_free_blocks)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Extend the table to hold `num_tokens`. Returns False, with nothing changed, if too few blocks are free."""
        table = self.table(request_id)
        wanted = self.blocks_for(num_tokens) - len(table)
        if wanted <= 0:
            return True
        if wanted > self.num_free_blocks:
            return False
        self._tables[request_id] = table + tuple(self._take() for _ in range(wanted))
        return True

    def free(self, request_id: str) -> int:
        """Free all blocks of a request; return their number. Known blocks without other users stay cached."""
        table = self._tables.pop(request_id, ())
        for block in reversed(table):  # LRU order: the end of a prefix is useless without its beginning
            self._leave(block)
        return len(table)

    # -- prefix cache -------------------------------------------------------------------------------------------------

    @property
    def reuses(self) -> bool:
        """Whether prefix caching is enabled."""
        return self._prefix is not None

    @property
    def known(self) -> Set[Key]:
        """Keys of the blocks that `reuse` can find."""
        return self._prefix.keys if self._prefix is not None else frozenset()

    def chain(self, request: Request) -> TokenChain | None:
        """The block keys of a request; None without a prefix cache."""
        return None if self._prefix is None else TokenChain(request, self.block_size, self._prefix.placeholders)

    def reuse(self, request_id: str, chain: TokenChain, cached_len: int, device_len: int) -> int:
        """Add known blocks to the table, from `cached_len` on; return the number of tokens with KV in place afterwards.

        A known block replaces a partially filled block of the request. Tokens that need hidden states, such as the last
        of the `device_len` known ones, are left to be computed.
        """
        assert self._prefix is not None
        table = list(self.table(request_id))
        place = cached_len // self.block_size
        while chain.may_find(place, device_len):
            block = self._prefix.find(chain.key(place))
            if block is None:
                break
            if not self._num_users[block]:
                self.books.take_cached_block(block)
            self._num_users[block] += 1
            if place < len(table):
                self._leave(table[place])
                table[place] = block
            else:
                table.append(block)
            place += 1
        if table:
            self._tables[request_id] = tuple(table)
        return max(cached_len, place * self.block_size)

    def num_shared(self, chain: TokenChain, cached_len: int) -> int:
        """The number of known blocks, of those for a chain's first `cached_len` tokens, that requests hold now."""
        if self._prefix is None:
            return 0
        found = [self._prefix.find(chain.key(place)) for place in range(cached_len // self.block_size)]
        return sum(block is not None and self._num_users[block] > 0 for block in found)

    def learn(self, request_id: str, chain: TokenChain, start: int, stop: int) -> None:
        """Register the blocks that became full when the KV of a request's tokens [start, stop) was computed."""
        assert self._prefix is not None
        table = self.table(request_id)
        for place in range(start // self.block_size, stop // self.block_size):
            self._prefix.learn(chain.key(place), table[place], chain.adapter)

    def forget(self, adapter: str) -> None:
        """Remove all blocks computed with this adapter version from the prefix cache."""
        if self._prefix is None:
            return
        for block in self._prefix.blocks_of(adapter):
            self._prefix.drop(block)
            if not self._num_users[block]:
                self.books.free_cached_block(block)

    def writable(self, request_id: str, first_token: int) -> bool:
        """Whether all blocks from that token on are held by this request only and are not known."""
        known = frozenset() if self._prefix is None else self._prefix.blocks
        own = self.table(request_id)[first_token // self.block_size :]
        return all(self._num_users[block] == 1 and block not in known for block in own)

    def check_integrity(self) -> None:
        """Assert that reference counts match the tables.

        Each taken block is in a table, each cached block is known and in no table, and no other block is taken.
        """
        assert all(self._tables.values()), "a request without blocks is listed as a holder"
        assert all(len(table) == len(set(table)) for table in self._tables.values()), "a block is twice in one table"
        placed = Counter(block for table in self._tables.values() for block in table)
        assert placed == self._num_users, f"blocks are in tables {placed}, but counted {self._num_users}"
        assert placed.keys() == self.books.taken_blocks, (
            f"{len(placed)} blocks are in tables, {len(self.books.taken_blocks)} are taken"
        )
        known = frozenset() if self._prefix is None else self._prefix.blocks
        assert known - placed.keys() == self.books.cached_blocks, (
            f"{len(known - placed.keys())} known blocks are in no table, {len(self.books.cached_blocks)} are cached"
        )
        if self._prefix is not None:
            self._prefix.check_integrity()

    def _rename(self, block: int, target: int) -> None:
        if self._num_users[block]:
            self._num_users[target] = self._num_users[block]
            for request_id, table in self._tables.items():
                if block in table:
                    self._tables[request_id] = tuple(target if other == block else other for other in table)
        del self._num_users[block]
        if self._prefix is not None:
            self._prefix.rename(block, target)

    def _take(self) -> int:
        block = self.books.take_block()
        assert block is not None, "free blocks were counted but none could be taken"
        self._num_users[block] = 1
        return block

    def _leave(self, block: int) -> None:
        self._num_users[block] -= 1
        if self._num_users[block]:
            return
        del self._num_users[block]
        if self._prefix is not None and block in self._prefix.blocks:
            self.books.cache_block(block)
        else:
            self.books.return_block(block)
