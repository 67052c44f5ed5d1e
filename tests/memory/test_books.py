"""Page ownership: runs from the low end, blocks from the high end, and an integrity check that can fail."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlora.memory.books import ArenaBooks, BlockTables, Run


def test_runs_take_the_lowest_gap_that_fits() -> None:
    books = ArenaBooks(20, 2)
    first, second, third = books.allocate_run(3), books.allocate_run(5), books.allocate_run(2)
    assert (first, second, third) == (Run(0, 3), Run(3, 5), Run(8, 2))
    books.free_run(Run(0, 3))
    assert books.allocate_run(4) == Run(10, 4), "the gap at 0 is too short"
    assert books.allocate_run(2) == Run(0, 2)
    books.check_integrity()


def test_blocks_are_taken_from_the_high_end_and_are_aligned() -> None:
    books = ArenaBooks(11, 3)  # blocks 0, 1, 2; pages 9 and 10 are too few for a block
    assert [books.take_block() for _ in range(4)] == [2, 1, 0, None]
    assert books.allocate_run(2) == Run(9, 2), "pages that form no block can form a run"
    books.check_integrity()


def test_a_returned_block_is_taken_again_before_lower_ones() -> None:
    books = ArenaBooks(8, 2)
    assert [books.take_block(), books.take_block()] == [3, 2]
    books.return_block(3)
    assert books.take_block() == 3


def test_a_run_makes_every_block_it_touches_unavailable_until_it_goes() -> None:
    books = ArenaBooks(12, 4)
    low, straddling = books.allocate_run(3), books.allocate_run(2)  # pages 0-2 and 3-4: blocks 0 and 1
    assert low is not None and straddling is not None
    assert books.num_free_blocks == 1
    books.free_run(low)
    assert books.num_free_blocks == 1, "the other run still owns page 3 of block 0"
    books.free_run(straddling)
    assert books.num_free_blocks == 3
    books.check_integrity()


def test_runs_and_blocks_meet_without_overlap() -> None:
    books = ArenaBooks(12, 3)
    assert books.allocate_run(4) == Run(0, 4)
    assert [books.take_block(), books.take_block(), books.take_block()] == [3, 2, None]
    assert books.allocate_run(3) is None
    assert books.allocate_run(2) == Run(4, 2)
    books.check_integrity()


def test_a_limit_keeps_runs_in_the_low_part() -> None:
    books = ArenaBooks(12, 2)
    assert books.allocate_run(5, limit=6) == Run(0, 5)
    assert books.allocate_run(2, limit=6) is None
    assert books.allocate_run(2) == Run(5, 2)


def test_giving_back_what_was_not_taken_is_a_mistake_of_ours() -> None:
    books = ArenaBooks(8, 2)
    with pytest.raises(AssertionError, match="not taken"):
        books.return_block(1)
    with pytest.raises(AssertionError, match="not allocated"):
        books.free_run(Run(0, 1))


def test_the_proof_fails_when_the_books_are_wrong() -> None:
    books = ArenaBooks(8, 2)
    books.allocate_run(3)
    books.take_block()
    for spoil in (
        lambda: books._runs.add(Run(2, 2)),  # overlaps the run at 0
        lambda: books._taken.add(1),  # also in the run
        lambda: books._taken.clear(),  # all blocks are lost
        lambda: books._pages.__setitem__(5, 1),  # a page without an owner
        lambda: setattr(books, "_num_free_blocks", 3),
    ):
        books.check_integrity()
        before = (set(books._runs), set(books._taken), bytearray(books._pages), books._num_free_blocks)
        spoil()
        with pytest.raises(AssertionError):
            books.check_integrity()
        books._runs, books._taken, books._pages, books._num_free_blocks = before


class Ledger:
    """A slow reference implementation: an owner name per page; finds gaps by trying every position."""

    def __init__(self, num_pages: int, pages_per_block: int) -> None:
        self.pages: list[object] = [None] * num_pages
        self.size = pages_per_block
        self.num_blocks = num_pages // pages_per_block

    def allocate_run(self, num_pages: int) -> Run | None:
        for first in range(len(self.pages) - num_pages + 1):
            if not any(self.pages[first : first + num_pages]):
                run = Run(first, num_pages)
                self.pages[first : run.end] = [run] * num_pages
                return run
        return None

    def free_blocks(self) -> list[int]:
        return [b for b in range(self.num_blocks) if not any(self.pages[b * self.size : (b + 1) * self.size])]

    def take_block(self) -> int | None:
        free = self.free_blocks()
        if not free:
            return None
        self.pages[free[-1] * self.size : (free[-1] + 1) * self.size] = [f"block {free[-1]}"] * self.size
        return free[-1]

    def forget(self, owner: object) -> None:
        self.pages = [None if page == owner else page for page in self.pages]


@given(
    num_pages=st.integers(4, 40),
    pages_per_block=st.integers(1, 4),
    actions=st.lists(st.tuples(st.sampled_from(["run", "block", "free", "return"]), st.integers(1, 9)), max_size=60),
)
def test_the_books_agree_with_a_page_by_page_ledger(
    num_pages: int, pages_per_block: int, actions: list[tuple[str, int]]
) -> None:
    books, ledger = ArenaBooks(num_pages, pages_per_block), Ledger(num_pages, pages_per_block)
    runs: list[Run] = []
    blocks: list[int] = []
    for action, number in actions:
        if action == "run":
            run = books.allocate_run(number)
            assert run == ledger.allocate_run(number)
            runs += [run] if run else []
        elif action == "block":
            block = books.take_block()
            assert block == ledger.take_block()
            blocks += [] if block is None else [block]
        elif action == "free" and runs:
            run = runs.pop(number % len(runs))
            books.free_run(run)
            ledger.forget(run)
        elif action == "return" and blocks:
            block = blocks.pop(number % len(blocks))
            books.return_block(block)
            ledger.forget(f"block {block}")
        assert books.num_free_blocks == len(ledger.free_blocks())
        books.check_integrity()


def test_a_table_grows_by_whole_blocks_and_keeps_its_order() -> None:
    tables = BlockTables(ArenaBooks(10, 1), block_size=4)
    assert tables.grow("a", 5)
    assert tables.table("a") == (9, 8)
    assert tables.grow("b", 1)
    assert tables.grow("a", 8)
    assert tables.table("a") == (9, 8), "eight tokens fit into two blocks"
    assert tables.grow("a", 9)
    assert tables.table("a") == (9, 8, 6)
    assert tables.holders == {"a", "b"}
    tables.check_integrity()


def test_growing_is_all_or_nothing() -> None:
    tables = BlockTables(ArenaBooks(3, 1), block_size=2)
    assert tables.grow("a", 4)
    assert tables.missing("b", 6) == 2
    assert not tables.grow("b", 6)
    assert tables.table("b") == () and tables.holders == {"a"} and tables.num_free_blocks == 1
    assert tables.missing("b", 2) == 0
    assert tables.grow("b", 2)
    tables.check_integrity()


def test_freeing_returns_every_block_once() -> None:
    tables = BlockTables(ArenaBooks(6, 2), block_size=8)
    tables.grow("a", 20)
    assert tables.free("a") == 3
    assert tables.free("a") == 0
    assert tables.num_free_blocks == tables.total_blocks == 3
    tables.check_integrity()


def test_the_tables_proof_fails_when_a_block_is_in_two_places_or_in_none() -> None:
    tables = BlockTables(ArenaBooks(4, 1), block_size=1)
    tables.grow("a", 2)
    tables._tables["b"] = (tables.table("a")[0],)
    with pytest.raises(AssertionError, match="but counted"):
        tables.check_integrity()
    tables._tables.pop("b")
    tables.check_integrity()
    tables.books.take_block()
    with pytest.raises(AssertionError, match="are taken"):
        tables.check_integrity()
