"""Page ownership: runs from the low end, blocks from the high end, and an integrity check that can fail."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlora.memory.page_allocator import PageAllocator, PageRun, check_ownership


def test_runs_take_the_lowest_gap_that_fits() -> None:
    allocator = PageAllocator(20, 2)
    first, second, third = allocator.allocate_run(3), allocator.allocate_run(5), allocator.allocate_run(2)
    assert (first, second, third) == (PageRun(0, 3), PageRun(3, 5), PageRun(8, 2))
    allocator.free_run(PageRun(0, 3))
    assert allocator.allocate_run(4) == PageRun(10, 4), "the gap at 0 is too short"
    assert allocator.allocate_run(2) == PageRun(0, 2)
    allocator.check_integrity()


def test_the_highest_free_block_is_taken_first_and_blocks_are_aligned() -> None:
    allocator = PageAllocator(11, 3)  # blocks 0, 1, 2; pages 9 and 10 are too few for a block
    assert [allocator.allocate_block() for _ in range(4)] == [2, 1, 0, None]
    allocator.free_block(2)
    assert allocator.allocate_block() == 2
    assert allocator.allocate_run(2) == PageRun(9, 2), "pages that form no block can form a run"
    allocator.check_integrity()


def test_a_run_makes_every_block_it_overlaps_unavailable() -> None:
    allocator = PageAllocator(12, 4)
    low, straddling = allocator.allocate_run(3), allocator.allocate_run(2)  # pages 0-2 and 3-4: blocks 0 and 1
    assert low is not None and straddling is not None
    assert allocator.num_free_blocks == 1
    allocator.free_run(low)
    assert allocator.num_free_blocks == 1, "the other run still owns page 3 of block 0"
    allocator.free_run(straddling)
    assert allocator.num_free_blocks == 3
    allocator.check_integrity()


def test_runs_and_blocks_meet_without_overlap() -> None:
    allocator = PageAllocator(12, 3)
    assert allocator.allocate_run(4) == PageRun(0, 4)
    assert [allocator.allocate_block(), allocator.allocate_block(), allocator.allocate_block()] == [3, 2, None]
    assert allocator.allocate_run(3) is None
    assert allocator.allocate_run(2) == PageRun(4, 2)
    allocator.check_integrity()


def test_a_limit_keeps_runs_in_the_low_part() -> None:
    allocator = PageAllocator(12, 2)
    assert allocator.allocate_run(5, limit=6) == PageRun(0, 5)
    assert allocator.allocate_run(2, limit=6) is None
    assert allocator.allocate_run(2) == PageRun(5, 2)
    with pytest.raises(AssertionError, match="not taken"):
        allocator.free_block(1)
    with pytest.raises(AssertionError, match="not allocated"):
        allocator.free_run(PageRun(0, 1))


def test_the_integrity_check_finds_wrong_state() -> None:
    allocator = PageAllocator(8, 2)
    allocator.allocate_run(3)
    allocator.allocate_block()
    state = allocator.ownership
    check_ownership(state)
    for corrupted in (
        state._replace(runs=state.runs | {PageRun(2, 2)}),  # overlaps the run at 0
        state._replace(taken_blocks=state.taken_blocks | {1}),  # also in the run
        state._replace(taken_blocks=frozenset()),  # all blocks are lost
        state._replace(pages=state.pages[:5] + b"\1" + state.pages[6:]),  # a page without an owner
        state._replace(num_free_blocks=3),
    ):
        with pytest.raises(AssertionError):
            check_ownership(corrupted)


class Ledger:
    """A slow reference implementation: an owner name per page; finds gaps by trying every position."""

    def __init__(self, num_pages: int, pages_per_block: int) -> None:
        self.pages: list[object] = [None] * num_pages
        self.size = pages_per_block
        self.num_blocks = num_pages // pages_per_block

    def allocate_run(self, num_pages: int) -> PageRun | None:
        for first in range(len(self.pages) - num_pages + 1):
            if not any(self.pages[first : first + num_pages]):
                run = PageRun(first, num_pages)
                self.pages[first : run.end] = [run] * num_pages
                return run
        return None

    def free_blocks(self) -> list[int]:
        return [b for b in range(self.num_blocks) if not any(self.pages[b * self.size : (b + 1) * self.size])]

    def allocate_block(self) -> int | None:
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
def test_the_allocator_agrees_with_a_page_by_page_model(
    num_pages: int, pages_per_block: int, actions: list[tuple[str, int]]
) -> None:
    allocator, ledger = PageAllocator(num_pages, pages_per_block), Ledger(num_pages, pages_per_block)
    runs: list[PageRun] = []
    blocks: list[int] = []
    for action, number in actions:
        if action == "run":
            run = allocator.allocate_run(number)
            assert run == ledger.allocate_run(number)
            runs += [run] if run else []
        elif action == "block":
            block = allocator.allocate_block()
            assert block == ledger.allocate_block()
            blocks += [] if block is None else [block]
        elif action == "free" and runs:
            run = runs.pop(number % len(runs))
            allocator.free_run(run)
            ledger.forget(run)
        elif action == "return" and blocks:
            block = blocks.pop(number % len(blocks))
            allocator.free_block(block)
            ledger.forget(f"block {block}")
        assert allocator.num_free_blocks == len(ledger.free_blocks())
        allocator.check_integrity()
