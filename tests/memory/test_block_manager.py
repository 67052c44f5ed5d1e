"""The blocks of each request: growth, freeing, and an integrity check that can fail."""

from __future__ import annotations

import pytest

from vlora.memory.block_manager import BlockManager
from vlora.memory.page_allocator import PageAllocator
from vlora.memory.written_blocks import WrittenBlocks


def test_a_table_grows_by_whole_blocks_and_keeps_its_order() -> None:
    block_manager = BlockManager(PageAllocator(10, 1), block_size=4)
    assert block_manager.grow("a", 5)
    assert block_manager.table("a") == (9, 8)
    assert block_manager.grow("b", 1)
    assert block_manager.grow("a", 8)
    assert block_manager.table("a") == (9, 8), "eight tokens fit into two blocks"
    assert block_manager.grow("a", 9)
    assert block_manager.table("a") == (9, 8, 6)
    assert block_manager.holders == {"a", "b"}
    block_manager.check_integrity()


def test_growing_is_all_or_nothing() -> None:
    block_manager = BlockManager(PageAllocator(3, 1), block_size=2)
    assert block_manager.grow("a", 4)
    assert block_manager.missing("b", 6) == 2
    assert not block_manager.grow("b", 6)
    assert block_manager.table("b") == () and block_manager.holders == {"a"} and block_manager.num_free_blocks == 1
    assert block_manager.missing("b", 2) == 0
    assert block_manager.grow("b", 2)
    block_manager.check_integrity()


def test_freeing_returns_every_block_once() -> None:
    block_manager = BlockManager(PageAllocator(6, 2), block_size=8)
    block_manager.grow("a", 20)
    for _ in range(2):
        block_manager.free("a")
        assert block_manager.num_free_blocks == block_manager.total_blocks == 3
    block_manager.check_integrity()


def test_blocks_that_a_launched_step_writes_are_freed_after_it() -> None:
    block_manager = WrittenBlocks(PageAllocator(6, 1), block_size=8)
    for name in ("a", "b"):
        block_manager.grow(name, 16)
    block_manager.keep_written(["a"])
    block_manager.free("a")
    block_manager.free("b")
    assert block_manager.num_free_blocks == 4 and not block_manager.holders
    block_manager.check_integrity()
    assert block_manager.grow("a", 8), "the same id may be used again"
    block_manager.keep_written(["a"])
    assert block_manager.num_free_blocks == 5
    block_manager.keep_written(())
    assert block_manager.holders == {"a"}
    block_manager.check_integrity()


def test_the_integrity_check_finds_a_block_that_was_allocated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    block_manager = BlockManager(PageAllocator(4, 1), block_size=1)
    block_manager.grow("a", 2)
    monkeypatch.setattr(block_manager.allocator, "allocate_block", lambda: block_manager.table("a")[0])
    block_manager.grow("b", 1)
    with pytest.raises(AssertionError, match="but counted"):
        block_manager.check_integrity()


def test_the_integrity_check_finds_lost_blocks() -> None:
    block_manager = BlockManager(PageAllocator(4, 1), block_size=1)
    block_manager.grow("a", 2)
    block_manager.check_integrity()
    block_manager.allocator.allocate_block()
    with pytest.raises(AssertionError, match="are taken"):
        block_manager.check_integrity()
