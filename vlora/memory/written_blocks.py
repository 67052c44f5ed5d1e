"""The KV blocks of requests on a device that computes a step while the next one is scheduled."""

from __future__ import annotations

from collections.abc import Iterable

from vlora.memory.block_manager import BlockManager


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
