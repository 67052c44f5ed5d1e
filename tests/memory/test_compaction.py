"""Compaction: runs and blocks move with their content, and the cheapest plan is used."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from tests.orchestrator.sample_requests import make_request
from vlora.memory.adapter_cache import AdapterCache, CompactionPlan, plan_compaction
from vlora.memory.block_manager import BlockManager
from vlora.memory.page_allocator import PageAllocator, PageRun
from vlora.memory.prefix_cache import PrefixCache, TokenChain


class Bytes:
    """A model of the arena's content: a label per page, copied as `PageAllocator` requests."""

    def __init__(self, num_pages: int) -> None:
        self.pages: list[object] = [None] * num_pages
        self.num_copied = 0

    def copy(self, first: int, target: int, num_pages: int) -> None:
        self.pages[target : target + num_pages] = self.pages[first : first + num_pages]
        self.num_copied += num_pages

    def write(self, run: PageRun, label: object) -> None:
        self.pages[run.first_page : run.end] = [(label, place) for place in range(run.num_pages)]

    def holds(self, run: PageRun, label: object) -> bool:
        return self.pages[run.first_page : run.end] == [(label, place) for place in range(run.num_pages)]


def make(num_pages: int, max_pages: int, pages_per_block: int = 1) -> tuple[AdapterCache, Bytes]:
    content = Bytes(num_pages)
    return AdapterCache(PageAllocator(num_pages, pages_per_block, copy=content.copy), max_pages), content


def cached_blocks(prefix: PrefixCache) -> dict[bytes, int]:
    """The known blocks by key."""
    return {key: block for key in prefix.keys if (block := prefix.find(key)) is not None}


# -- single scenarios -------------------------------------------------------------------------------------------------


def test_a_small_adapter_moves_to_make_room_for_a_large_one() -> None:
    adapter_cache, content = make(20, 10)
    for name, pages in (("a", 3), ("small", 1), ("b", 3), ("c", 3)):
        adapter_cache.allocate(name, pages)
    adapter_cache.touch("small")
    content.write(adapter_cache.run("small"), "small")
    adapter_cache.free("a")
    adapter_cache.free("b")
    # Free: pages 0 to 2 and 4 to 6. Without moving, the three pages of c would have to be evicted.
    assert adapter_cache.allocate("large", 6) == PageRun(0, 6)
    assert adapter_cache.resident == {"small", "c", "large"} and adapter_cache.drain_evicted() == ()
    assert adapter_cache.drain_moved() == ("small",) and adapter_cache.drain_moved() == ()
    assert adapter_cache.run("small") == PageRun(6, 1) and content.holds(PageRun(6, 1), "small")
    assert content.num_copied == 1
    adapter_cache.check_integrity()
    adapter_cache.allocator.check_integrity()


def test_a_run_may_move_to_overlapping_pages() -> None:
    adapter_cache, content = make(20, 17)
    for name, pages in (("gone", 1), ("a", 4), ("gap", 2), ("pinned", 1), ("cold", 9)):
        adapter_cache.allocate(name, pages)
    adapter_cache.pin("pinned")
    adapter_cache.touch("a")
    content.write(adapter_cache.run("a"), "a")
    for name in ("gone", "gap"):
        adapter_cache.free(name)
    assert adapter_cache.allocate("b", 3) == PageRun(0, 3) and adapter_cache.drain_evicted() == ()
    assert adapter_cache.run("a") == PageRun(3, 4) and content.holds(PageRun(3, 4), "a")


def test_used_blocks_move_out_of_the_adapters_share() -> None:
    adapter_cache, content = make(8, 4)
    block_manager = BlockManager(adapter_cache.allocator, block_size=1)
    block_manager.grow("early", 4)  # the high end
    block_manager.grow("r", 2)
    for place, block in enumerate(block_manager.table("r")):
        content.write(adapter_cache.allocator.pages_of(block), place)
    block_manager.free("early")
    assert block_manager.table("r") == (3, 2)
    assert adapter_cache.allocate("a", 4) == PageRun(0, 4)
    assert block_manager.table("r") == (6, 7) or block_manager.table("r") == (7, 6)
    assert all(
        content.holds(adapter_cache.allocator.pages_of(block), place)
        for place, block in enumerate(block_manager.table("r"))
    )
    block_manager.check_integrity()
    adapter_cache.allocator.check_integrity()


def test_allocation_fails_if_pinned_runs_or_used_blocks_cannot_move() -> None:
    adapter_cache, content = make(8, 4)
    adapter_cache.allocate("gone", 1)
    adapter_cache.allocate("pinned", 2)
    adapter_cache.pin("pinned")
    adapter_cache.free("gone")
    assert adapter_cache.allocate("a", 2) is None, "one free page on each side of the pinned one"
    adapter_cache.unpin("pinned")
    blocks = [adapter_cache.allocator.allocate_block() for _ in range(6)]
    assert blocks == [7, 6, 5, 4, 3, 0]
    assert adapter_cache.allocate("b", 3) is None, "no free place for block 0"
    assert adapter_cache.resident == {"pinned"} and content.num_copied == 0
    adapter_cache.allocator.free_block(7)
    assert adapter_cache.allocate("b", 3) == PageRun(0, 3) and adapter_cache.drain_evicted() == ("pinned",)
    assert adapter_cache.allocator.taken_blocks == {7, 6, 5, 4, 3} and content.num_copied == 1


def test_the_plan_that_copies_fewer_pages_is_chosen() -> None:
    adapter_cache, content = make(30, 12)
    for name, pages in (("cold", 1), ("x", 1), ("large", 8), ("y", 2)):
        adapter_cache.allocate(name, pages)
    adapter_cache.free("x")
    # Free: page 1. Moving the cold adapter's page would make room, but evicting it is cheaper.
    assert adapter_cache.allocate("b", 2) == PageRun(0, 2)
    assert adapter_cache.drain_evicted() == ("cold",) and content.num_copied == 0


def test_a_cached_block_that_moves_keeps_its_content() -> None:
    content = Bytes(8)
    prefix = PrefixCache({})
    allocator = PageAllocator(8, 1, on_evict=prefix.remove, copy=content.copy)
    adapter_cache, block_manager = AdapterCache(allocator, 4), BlockManager(allocator, 2, prefix)
    block_manager.grow("early", 8)  # blocks 7 to 4
    request = make_request("r", prompt=5)
    chain = TokenChain(request, 2, {})
    assert block_manager.grow("r", 5)  # blocks 3, 2, 1
    content.write(allocator.pages_of(3), "first")
    block_manager.register_full_blocks("r", chain, 0, 4)
    block_manager.free("early")
    block_manager.free("r")
    assert allocator.cached_blocks == {3, 2}
    assert adapter_cache.allocate("a", 4) == PageRun(0, 4)
    assert allocator.cached_blocks == {7, 6} and len(prefix.keys) == 2
    assert block_manager.reuse("again", TokenChain(request, 2, {}), 0, 5) == 4
    assert content.holds(allocator.pages_of(block_manager.table("again")[0]), "first")
    block_manager.check_integrity()
    allocator.check_integrity()
    # With no free block, a block in use replaces the least recently used cached block, which is discarded.
    adapter_cache.free("a")
    block_manager.free("again")
    block_manager.grow("all", 12)
    assert adapter_cache.allocate("b", 3) is None, "six blocks in use and three pages exceed eight pages"
    assert adapter_cache.allocate("c", 2) is not None and len(prefix.keys) == 0
    block_manager.check_integrity()
    allocator.check_integrity()


# -- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=scaled(300))
@given(
    max_pages=st.integers(1, 16),
    pages_per_block=st.integers(1, 3),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["load", "load", "evict", "pin", "unpin", "grow", "grow", "free"]),
            st.sampled_from("abcdef"),
            st.integers(1, 7),
        ),
        max_size=60,
    ),
)
def test_content_is_kept_by_any_sequence_of_moves(
    max_pages: int, pages_per_block: int, actions: list[tuple[str, str, int]]
) -> None:
    content = Bytes(24)
    prefix = PrefixCache({})
    allocator = PageAllocator(24, pages_per_block, on_evict=prefix.remove, copy=content.copy)
    adapter_cache, block_manager = AdapterCache(allocator, max_pages), BlockManager(allocator, 2, prefix)
    sizes = dict(zip("abcdef", (1, 2, 3, 4, 5, 7), strict=True))
    pins: list[str] = []
    known: dict[bytes, object] = {}  # expected content of the cached blocks
    for number, (action, name, size) in enumerate(actions):
        before = {other: adapter_cache.run(other) for other in adapter_cache.resident}
        if action == "load":
            copied, tables_before = content.num_copied, {r: block_manager.table(r) for r in block_manager.holders}
            cached = cached_blocks(prefix)
            run = adapter_cache.allocate(name, sizes[name])
            evicted, moved = adapter_cache.drain_evicted(), adapter_cache.drain_moved()
            assert not {*evicted, *moved} & set(pins), "a pinned adapter moved or left"
            assert {n for n in before if n not in evicted and adapter_cache.run(n) != before[n]} == set(moved)
            assert all(len(block_manager.table(r)) == len(table) for r, table in tables_before.items())
            if run is None:
                assert copied == content.num_copied and not evicted and cached == cached_blocks(prefix), (
                    "a failed allocation moved, evicted or discarded content"
                )
            elif name not in before:
                content.write(run, name)
        elif action == "evict" and name in before and name not in pins:
            adapter_cache.free(name)
        elif action == "pin" and name in before:
            adapter_cache.pin(name)
            pins.append(name)
        elif action == "unpin" and name in pins:
            adapter_cache.unpin(name)
            pins.remove(name)
        elif action == "grow" and block_manager.grow(name, 2 * size) and name not in known:
            for place, block in enumerate(block_manager.table(name)):
                content.write(allocator.pages_of(block), (name, place))
        elif action == "free" and block_manager.table(name):
            # Keep some of the computed blocks in the cache, under distinct prompts.
            table = block_manager.table(name)
            chain = TokenChain(make_request("r", prompt=tuple(range(number + 1, number + 2 + 2 * len(table)))), 2, {})
            if size > 3:
                block_manager.register_full_blocks(name, chain, 0, 2 * len(table))
                known.update({chain.key(place): (name, place) for place in range(len(table))})
            block_manager.free(name)
        for other in adapter_cache.resident:
            assert content.holds(adapter_cache.run(other), other), f"the content of {other} is lost"
        for holder in block_manager.holders:
            for place, block in enumerate(block_manager.table(holder)):
                assert content.holds(allocator.pages_of(block), (holder, place)), "KV content is lost"
        for key, block in cached_blocks(prefix).items():
            assert content.holds(allocator.pages_of(block), known[key]), "a known block has other content"
        adapter_cache.check_integrity()
        block_manager.check_integrity()
        allocator.check_integrity()


def test_without_pins_an_adapter_that_fits_the_free_pages_is_placed() -> None:
    """Adapters of at most one page less than the free pages always fit, for any fragmentation."""
    for seed in range(40):
        draws = random.Random(seed)
        adapter_cache, _ = make(40, 20)
        names = [f"a{i}" for i in range(12)]
        for name in names:
            adapter_cache.allocate(name, draws.randint(1, 3))
        for name in draws.sample(sorted(adapter_cache.resident), k=5):
            adapter_cache.free(name)
        adapter_cache.drain_evicted()
        room = 20 - adapter_cache.num_pages
        assert adapter_cache.allocate("new", room) is not None
        adapter_cache.allocator.check_integrity()
        if room <= 20 - room:
            assert adapter_cache.resident >= {"new"}


def test_planning_changes_nothing() -> None:
    allocator = PageAllocator(12, 2)
    gone, run = allocator.allocate_run(2), allocator.allocate_run(3)
    allocator.allocate_block()
    assert gone is not None and run is not None
    before = (allocator.runs, allocator.taken_blocks, allocator.page_map())
    plan = plan_compaction(allocator, 5, 8, [run], [gone])
    assert plan == CompactionPlan(0, (), ((run, 5),), (), 3)
    assert (allocator.runs, allocator.taken_blocks, allocator.page_map()) == before
