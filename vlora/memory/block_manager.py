"""The KV blocks of each request, and their sharing through the prefix cache. Bookkeeping only: no bytes, no policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

from vlora.memory.page_allocator import PageAllocator
from vlora.memory.prefix_cache import Key, PrefixCache, TokenChain
from vlora.types import Request


class BlockManager:
    """The KV blocks of each request, in token order. With a prefix cache, requests with a common prefix share blocks.

    Shared and known blocks are full and read-only: a request writes only to the blocks after them.
    written, kept: see `WrittenBlocks`.
    """

    written: frozenset[str] = frozenset()
    kept: tuple[int, ...] = ()

    def __init__(self, allocator: PageAllocator, block_size: int, prefix: PrefixCache | None = None) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self._prefix = prefix
        self._tables: dict[str, tuple[int, ...]] = {}
        self._num_users: Counter[int] = Counter()
        allocator.on_block_moved(self._rename)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self.allocator.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without users that keep their content."""
        return len(self.allocator.cached_blocks)

    @property
    def num_taken_blocks(self) -> int:
        """Blocks that requests hold, each counted once."""
        return len(self._num_users)

    @property
    def total_blocks(self) -> int:
        return self.allocator.num_blocks

    @property
    def holders(self) -> frozenset[str]:
        return frozenset(self._tables)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> tuple[int, ...]:
        return self._tables.get(request_id, ())

    def num_users(self, block: int) -> int:
        return self._num_users[block]

    def num_own(self, request_id: str) -> int:
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
        self._tables[request_id] = table + tuple(self._allocate() for _ in range(wanted))
        return True

    def free(self, request_id: str) -> None:
        """Free all blocks of a request. Known blocks without other users stay cached."""
        for block in reversed(self._tables.pop(request_id, ())):  # LRU: the end of a prefix is useless alone
            self._release(block)

    # -- prefix cache -------------------------------------------------------------------------------------------------

    @property
    def reuses(self) -> bool:
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
                self.allocator.reuse_cached_block(block)
            self._num_users[block] += 1
            if place < len(table):
                self._release(table[place])
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

    def register_full_blocks(self, request_id: str, chain: TokenChain, start: int, stop: int) -> None:
        """Register the blocks that became full when the KV of a request's tokens [start, stop) was computed."""
        assert self._prefix is not None
        table = self.table(request_id)
        for place in range(start // self.block_size, stop // self.block_size):
            self._prefix.add(chain.key(place), table[place], chain.adapter_of(place))

    def forget(self, adapter: str) -> None:
        """Remove all blocks computed with this adapter version from the prefix cache."""
        if self._prefix is None:
            return
        for block in self._prefix.blocks_of(adapter):
            self._prefix.remove(block)
            if not self._num_users[block]:
                self.allocator.free_cached_block(block)

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
        placed = Counter(block for table in (*self._tables.values(), self.kept) for block in table)
        assert placed == self._num_users, f"blocks are in tables {placed}, but counted {self._num_users}"
        assert placed.keys() == self.allocator.taken_blocks, (
            f"{len(placed)} blocks are in tables, {len(self.allocator.taken_blocks)} are taken"
        )
        known = frozenset() if self._prefix is None else self._prefix.blocks
        assert known - placed.keys() == self.allocator.cached_blocks, (
            f"{len(known - placed.keys())} known blocks are in no table, {len(self.allocator.cached_blocks)} are cached"
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

    def _allocate(self) -> int:
        block = self.allocator.allocate_block()
        assert block is not None, "free blocks were counted but none could be taken"
        self._num_users[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._num_users[block] -= 1
        if self._num_users[block]:
            return
        del self._num_users[block]
        if self._prefix is not None and block in self._prefix.blocks:
            self.allocator.cache_block(block)
        else:
            self.allocator.free_block(block)


class WrittenBlocks(BlockManager):
    """Keeps the blocks of a request that ends while a launched step writes to them, until that step is collected.

    Attributes:
        written: requests with blocks that a launched step writes.
        kept: blocks of those that have ended, in the order in which they will be freed.
    """

    def keep_written(self, request_ids: Iterable[str]) -> None:
        """Keep the blocks of these requests from now on, and free those that were kept."""
        self.written = frozenset(request_ids)
        kept, self.kept = self.kept, ()
        for block in kept:
            self._release(block)

    def free(self, request_id: str) -> None:
        if request_id in self.written:
            self.kept += tuple(reversed(self._tables.pop(request_id, ())))
        else:
            super().free(request_id)

    def _rename(self, block: int, target: int) -> None:
        self.kept = tuple(target if other == block else other for other in self.kept)
        super()._rename(block, target)
