"""The arena's pages: runs of adapters from the low end, KV blocks from the high end; eviction, and moves for room."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from tests.orchestrator.sample_requests import make_request
from vlora.memory.adapter_cache import AdapterCache, CompactionPlan, plan_compaction
from vlora.memory.block_manager import BlockManager
from vlora.memory.page_allocator import PageAllocator, PageRun, check_ownership
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


def make(num_pages: int = 20, max_pages: int = 10, held: str = "", pages_per_block: int = 1) -> AdapterCache:
    """`held`: adapters in order of use, such as a3 for three pages."""
    content = Bytes(num_pages)
    adapter_cache = AdapterCache(PageAllocator(num_pages, pages_per_block, copy=content.copy), max_pages)
    for each in held.split():
        adapter_cache.allocate(each[0], int(each[1:]))
    return adapter_cache


# -- runs and blocks --------------------------------------------------------------------------------------------------


class Ledger:
    """A slow reference implementation: an owner name per page; finds gaps by trying every position."""

    def __init__(self, num_pages: int, pages_per_block: int) -> None:
        self.pages: list[object] = [None] * num_pages
        self.size = pages_per_block
        self.num_blocks = num_pages // pages_per_block

    def allocate_run(self, num_pages: int, limit: int) -> PageRun | None:
        for first in range(min(limit, len(self.pages)) - num_pages + 1):
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
    limit=st.integers(2, 40),
    actions=st.lists(st.tuples(st.sampled_from(["run", "block", "free", "return"]), st.integers(1, 9)), max_size=60),
)
def test_the_allocator_agrees_with_a_page_by_page_model(
    num_pages: int, pages_per_block: int, limit: int, actions: list[tuple[str, int]]
) -> None:
    allocator, ledger = PageAllocator(num_pages, pages_per_block), Ledger(num_pages, pages_per_block)
    runs: list[PageRun] = []
    blocks: list[int] = []
    for action, number in actions:
        if action == "run":
            run = allocator.allocate_run(number, min(limit, num_pages))
            assert run == ledger.allocate_run(number, limit)
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


def test_the_integrity_check_finds_wrong_state() -> None:
    allocator = PageAllocator(8, 2)
    assert allocator.allocate_run(3) == PageRun(0, 3)
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
    with pytest.raises(AssertionError, match="not taken"):
        allocator.free_block(1)
    with pytest.raises(AssertionError, match="not allocated"):
        allocator.free_run(PageRun(0, 1))
    adapter_cache = make(held="a2")
    adapter_cache.check_integrity()
    adapter_cache.allocator.allocate_run(1)
    with pytest.raises(AssertionError, match="PageAllocator lists 2"):
        adapter_cache.check_integrity()


# -- eviction ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "max_pages", "pinned", "used", "pages", "run", "evicted"),
    [
        pytest.param("a3 b3 c3", 10, "", "a", 3, PageRun(3, 3), "b", id="the least recently used one leaves"),
        pytest.param("a2 b2 c2 d2", 8, "", "", 4, PageRun(0, 4), "ab", id="no more than necessary"),
        pytest.param("a3 b3 c3", 10, "a", "", 3, PageRun(3, 3), "b", id="a pinned one stays"),
        pytest.param("c2 p4", 10, "p", "", 5, None, "", id="without room nothing leaves: 2 pages before, 4 after"),
        pytest.param("a4", 6, "a", "", 3, None, "", id="free pages beyond the share are not used"),
    ],
)
def test_which_adapters_are_evicted(
    held: str, max_pages: int, pinned: str, used: str, pages: int, run: PageRun | None, evicted: str
) -> None:
    adapter_cache = make(max_pages=max_pages, held=held)
    for name in pinned:
        adapter_cache.pin(name)
    for name in used:
        adapter_cache.touch(name)
    before = adapter_cache.resident
    assert adapter_cache.allocate("new", pages) == run
    assert adapter_cache.drain_evicted() == tuple(evicted) and adapter_cache.drain_evicted() == ()
    assert adapter_cache.resident == before - {*evicted} | ({"new"} if run else set())
    adapter_cache.check_integrity()


def test_a_pinned_adapter_stays_until_unpinned_as_often_as_pinned() -> None:
    adapter_cache = make(max_pages=4, held="a4")
    for pins in (1, 1, -1):
        (adapter_cache.pin if pins > 0 else adapter_cache.unpin)("a")
        assert adapter_cache.allocate("b", 1) is None
        adapter_cache.evict_for_blocks(9, kept=frozenset())
        with pytest.raises(AssertionError, match="pinned"):
            adapter_cache.free("a")
    adapter_cache.unpin("a")
    assert adapter_cache.allocate("b", 1) == PageRun(0, 1)
    adapter_cache.free("b")
    with pytest.raises(AssertionError, match="not resident"):
        adapter_cache.pin("b")


def test_kv_pressure_evicts_what_is_neither_kept_nor_pinned_in_order_of_use() -> None:
    adapter_cache = make(held="a2 b2 c2 d2", pages_per_block=2)
    adapter_cache.pin("a")
    adapter_cache.touch("b")
    adapter_cache.evict_for_blocks(2, kept={"c"})
    assert adapter_cache.drain_evicted() == ("d", "b") and adapter_cache.resident == {"a", "c"}


def test_a_hundred_failing_allocations_search_for_room_once(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter_cache = make(max_pages=4, held="a4")
    adapter_cache.pin("a")
    searches: list[object] = []
    search = adapter_cache.room_beside

    def counted(kept: Iterable[PageRun]) -> int:
        searches.append(kept)
        return search(kept)

    monkeypatch.setattr(adapter_cache, "room_beside", counted)
    assert not any(adapter_cache.allocate(f"b{number}", 1 + number % 4) for number in range(100))
    assert len(searches) == 1
    adapter_cache.unpin("a")
    assert adapter_cache.allocate("b", 4) == PageRun(0, 4) and len(searches) == 1
    adapter_cache.pin("b")
    assert adapter_cache.allocate("c", 1) is None and len(searches) == 2


def test_reserved_pages_count_in_the_share_and_are_not_evicted() -> None:
    adapter_cache = make(max_pages=6, held="a3")
    reserved = adapter_cache.reserve(2)
    assert reserved == PageRun(3, 2) and adapter_cache.num_pages == 5
    assert adapter_cache.reserve(2) is None, "reserving evicts no adapter"
    assert adapter_cache.allocate("b", 4) is None
    adapter_cache.release(reserved)
    assert adapter_cache.allocate("b", 4) is not None
    adapter_cache.check_integrity()


# -- moves ------------------------------------------------------------------------------------------------------------


def test_the_plan_that_copies_fewer_pages_is_chosen() -> None:
    adapter_cache = make(held="a3 s1 b3 c3")
    adapter_cache.touch("s")
    adapter_cache.free("a")
    adapter_cache.free("b")
    # Free: pages 0 to 2 and 4 to 6. Without moving s, the three pages of c would have to be evicted.
    assert adapter_cache.allocate("large", 6) == PageRun(0, 6) and adapter_cache.drain_evicted() == ()
    assert adapter_cache.drain_moved() == ("s",) and adapter_cache.drain_moved() == ()
    adapter_cache = make(30, 12, "c1 x1 l8 y2")
    adapter_cache.free("x")
    # Free: page 1. Moving the page of c would make room, but evicting it is cheaper.
    assert adapter_cache.allocate("b", 2) == PageRun(0, 2)
    assert adapter_cache.drain_evicted() == ("c",) and adapter_cache.drain_moved() == ()


def test_a_run_may_move_to_overlapping_pages_with_its_content() -> None:
    content = Bytes(20)
    adapter_cache = AdapterCache(PageAllocator(20, 1, copy=content.copy), 17)
    for name, pages in (("g", 1), ("a", 4), ("h", 2), ("p", 1), ("c", 9)):
        adapter_cache.allocate(name, pages)
    adapter_cache.pin("p")
    adapter_cache.touch("a")
    content.write(adapter_cache.run("a"), "a")
    for name in "gh":
        adapter_cache.free(name)
    assert adapter_cache.allocate("b", 3) == PageRun(0, 3) and adapter_cache.drain_evicted() == ()
    assert adapter_cache.run("a") == PageRun(3, 4) and content.holds(PageRun(3, 4), "a") and content.num_copied == 4


def test_pinned_runs_and_used_blocks_without_another_place_stay() -> None:
    adapter_cache = make(8, 4, "g1 p2")
    adapter_cache.pin("p")
    adapter_cache.free("g")
    assert adapter_cache.allocate("a", 2) is None, "one free page on each side of the pinned one"
    adapter_cache.unpin("p")
    assert [adapter_cache.allocator.allocate_block() for _ in range(6)] == [7, 6, 5, 4, 3, 0]
    assert adapter_cache.allocate("b", 3) is None and adapter_cache.resident == {"p"}, "no free place for block 0"
    adapter_cache.allocator.free_block(7)
    assert adapter_cache.allocate("b", 3) == PageRun(0, 3) and adapter_cache.drain_evicted() == ("p",)
    assert adapter_cache.allocator.taken_blocks == {7, 6, 5, 4, 3}


def test_used_blocks_move_out_of_the_adapters_share() -> None:
    adapter_cache = make(8, 4)
    block_manager = BlockManager(adapter_cache.allocator, block_size=1)
    block_manager.grow("early", 4)  # the high end
    block_manager.grow("r", 2)
    block_manager.free("early")
    assert block_manager.table("r") == (3, 2) and adapter_cache.allocate("a", 4) == PageRun(0, 4)
    assert {*block_manager.table("r")} == {6, 7}
    block_manager.check_integrity()


def test_a_block_in_use_takes_the_place_of_a_cached_one() -> None:
    prefix = PrefixCache({})
    allocator = PageAllocator(8, 1, on_evict=prefix.remove)
    adapter_cache, block_manager = AdapterCache(allocator, 4), BlockManager(allocator, 2, prefix)
    block_manager.grow("early", 8)  # blocks 7 to 4
    chain = TokenChain(make_request("r", prompt=5), 2, {})
    assert block_manager.grow("r", 5)  # blocks 3, 2, 1
    block_manager.register_full_blocks("r", chain, 0, 4)
    for name in ("early", "r"):
        block_manager.free(name)
    assert adapter_cache.allocate("a", 4) == PageRun(0, 4) and allocator.cached_blocks == {7, 6}
    assert block_manager.reuse("again", TokenChain(make_request("r", prompt=5), 2, {}), 0, 5) == 4
    adapter_cache.free("a")
    block_manager.free("again")
    block_manager.grow("all", 12)
    assert adapter_cache.allocate("b", 3) is None, "six blocks in use and three pages exceed eight pages"
    assert adapter_cache.allocate("c", 2) is not None and len(prefix.keys) == 0
    block_manager.check_integrity()
    allocator.check_integrity()


def test_planning_changes_nothing() -> None:
    allocator = PageAllocator(12, 2)
    gone, run = allocator.allocate_run(2), allocator.allocate_run(3)
    allocator.allocate_block()
    assert gone is not None and run is not None
    before = (allocator.runs, allocator.taken_blocks, allocator.page_map())
    assert plan_compaction(allocator, 5, 8, [run], [gone]) == CompactionPlan(0, (), ((run, 5),), (), 3)
    assert (allocator.runs, allocator.taken_blocks, allocator.page_map()) == before
    assert plan_compaction(allocator, 3, 6, [run], []) is None, "the run at page 2 has no other place"


def cached_blocks(prefix: PrefixCache) -> dict[bytes, int]:
    """The known blocks by key."""
    return {key: block for key in prefix.keys if (block := prefix.find(key)) is not None}


@pytest.mark.slow
@settings(max_examples=scaled(300))
@given(
    max_pages=st.integers(1, 16),
    pages_per_block=st.integers(1, 3),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["load", "load", "touch", "evict", "pin", "unpin", "grow", "grow", "free"]),
            st.sampled_from("abcdef"),
            st.integers(1, 7),
        ),
        max_size=60,
    ),
)
def test_any_sequence_of_operations_keeps_content_order_and_pins(
    max_pages: int, pages_per_block: int, actions: list[tuple[str, str, int]]
) -> None:
    content = Bytes(24)
    prefix = PrefixCache({})
    allocator = PageAllocator(24, pages_per_block, on_evict=prefix.remove, copy=content.copy)
    adapter_cache, block_manager = AdapterCache(allocator, max_pages), BlockManager(allocator, 2, prefix)
    sizes = dict(zip("abcdef", (1, 2, 3, 4, 5, 7), strict=True))
    pins: list[str] = []
    recency: list[str] = []
    known: dict[bytes, object] = {}  # expected content of the cached blocks
    for number, (action, name, size) in enumerate(actions):
        before = {other: adapter_cache.run(other) for other in adapter_cache.resident}
        if action == "load":
            copied, tables_before = content.num_copied, {r: block_manager.table(r) for r in block_manager.holders}
            cached = cached_blocks(prefix)
            run = adapter_cache.allocate(name, sizes[name])
            evicted, moved = adapter_cache.drain_evicted(), adapter_cache.drain_moved()
            assert not {*evicted, *moved} & set(pins), "a pinned adapter moved or left"
            assert list(evicted) == [n for n in recency if n not in pins][: len(evicted)], "not evicted in LRU order"
            assert {n for n in before if n not in evicted and adapter_cache.run(n) != before[n]} == set(moved)
            assert all(len(block_manager.table(r)) == len(table) for r, table in tables_before.items())
            if run is None:
                assert copied == content.num_copied and not evicted and cached == cached_blocks(prefix), (
                    "a failed allocation moved, evicted or discarded content"
                )
            else:
                assert run.num_pages == sizes[name] and run.end <= max_pages
                assert adapter_cache.resident == before.keys() - set(evicted) | {name}
                recency = [n for n in recency if n not in evicted and n != name] + [name]
                if name not in before:
                    content.write(run, name)
        elif action == "touch" and name in before:
            adapter_cache.touch(name)
            recency = [n for n in recency if n != name] + [name]
        elif action == "evict" and name in before and name not in pins:
            adapter_cache.free(name)
            recency.remove(name)
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
