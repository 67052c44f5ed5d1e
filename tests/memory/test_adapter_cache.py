"""The adapter cache: LRU eviction, pinning, reservations, and no eviction without a successful allocation."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.page_allocator import PageAllocator, PageRun


def make(num_pages: int = 20, max_pages: int = 10, held: str = "") -> AdapterCache:
    """`held`: adapters in order of use, such as a3 for three pages."""
    adapter_cache = AdapterCache(PageAllocator(num_pages, 2), max_pages)
    for each in held.split():
        adapter_cache.allocate(each[0], int(each[1:]))
    return adapter_cache


@pytest.mark.parametrize(
    ("held", "max_pages", "pinned", "used", "pages", "run", "evicted"),
    [
        pytest.param("a3 b3 c3", 10, "", "a", 3, PageRun(3, 3), "b", id="the least recently used one leaves"),
        pytest.param("a2 b2 c2 d2", 8, "", "", 4, PageRun(0, 4), "ab", id="no more than necessary"),
        pytest.param("a3 b3 c3", 10, "a", "", 3, PageRun(3, 3), "b", id="a pinned one stays"),
        pytest.param("c2 p4", 10, "p", "", 5, None, "", id="without room nothing leaves: 2 pages before, 4 after"),
        pytest.param("c2 p4", 10, "p", "", 11, None, "", id="more than the share"),
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
        assert adapter_cache.allocate(name, 3) == adapter_cache.run(name), "a resident one is only marked as used"
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
    assert adapter_cache.allocator.num_free_blocks == 10
    with pytest.raises(AssertionError, match="not resident"):
        adapter_cache.pin("b")


def test_kv_pressure_evicts_what_is_neither_kept_nor_pinned_in_order_of_use() -> None:
    adapter_cache = make(held="a2 b2 c2 d2")
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
    assert (
        all(adapter_cache.allocate(f"b{number}", 1 + number % 4) is None for number in range(100))
        and len(searches) == 1
    )
    adapter_cache.unpin("a")
    assert adapter_cache.allocate("b", 4) == PageRun(0, 4) and len(searches) == 1
    adapter_cache.pin("b")
    assert adapter_cache.allocate("c", 1) is None and len(searches) == 2


def test_kv_blocks_in_the_adapters_share_are_never_overwritten() -> None:
    adapter_cache = make(num_pages=8, max_pages=4)
    blocks = [adapter_cache.allocator.allocate_block() for _ in range(3)]
    assert adapter_cache.allocate("a", 3) is None
    adapter_cache.allocator.free_block(blocks[-1] or 0)
    assert adapter_cache.allocate("a", 3) == PageRun(0, 3)
    adapter_cache.allocator.check_integrity()


def test_reserved_pages_count_in_the_share_and_are_not_evicted() -> None:
    adapter_cache = make(max_pages=6, held="a3")
    reserved = adapter_cache.reserve(2)
    assert reserved == PageRun(3, 2)
    assert adapter_cache.reserve(2) is None, "reserving evicts no adapter"
    assert adapter_cache.allocate("b", 4) is None
    assert adapter_cache.num_pages == 5
    adapter_cache.release(reserved)
    assert adapter_cache.allocate("b", 4) is not None
    adapter_cache.check_integrity()


def test_the_integrity_check_finds_an_unaccounted_run() -> None:
    adapter_cache = make(held="a2")
    adapter_cache.check_integrity()
    adapter_cache.allocator.allocate_run(1)
    with pytest.raises(AssertionError, match="PageAllocator lists 2"):
        adapter_cache.check_integrity()


@given(
    max_pages=st.integers(1, 16),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["load", "touch", "pin", "unpin", "evict", "take", "return"]),
            st.sampled_from("abcdef"),
            st.integers(1, 7),
        ),
        max_size=60,
    ),
)
def test_any_sequence_of_operations_keeps_the_invariants(max_pages: int, actions: list[tuple[str, str, int]]) -> None:
    adapter_cache = AdapterCache(PageAllocator(24, 2), max_pages)
    allocator = adapter_cache.allocator
    sizes: dict[str, int] = {}
    pins: list[str] = []
    recency: list[str] = []
    blocks: list[int] = []
    for action, name, number in actions:
        if action == "load":
            before = adapter_cache.resident
            run = adapter_cache.allocate(name, sizes.get(name, number))
            evicted = adapter_cache.drain_evicted()
            assert not set(evicted) & set(pins), "a pinned adapter was evicted"
            assert list(evicted) == [n for n in recency if n not in pins][: len(evicted)], "not evicted in LRU order"
            if run is None:
                assert adapter_cache.resident == before
            else:
                assert run.num_pages == sizes.setdefault(name, number) and run.end <= max_pages
                assert adapter_cache.resident == (before - set(evicted)) | {name}
                recency = [n for n in recency if n not in evicted and n != name] + [name]
            for gone in evicted:
                del sizes[gone]
        elif action == "take":
            block = allocator.allocate_block()
            blocks += [] if block is None else [block]
        elif action == "return" and blocks:
            allocator.free_block(blocks.pop(number % len(blocks)))
        elif name in adapter_cache.resident:
            if action == "touch":
                adapter_cache.touch(name)
                recency = [n for n in recency if n != name] + [name]
            elif action == "pin":
                adapter_cache.pin(name)
                pins.append(name)
            elif action == "unpin" and name in pins:
                adapter_cache.unpin(name)
                pins.remove(name)
            elif action == "evict" and name not in pins:
                adapter_cache.free(name)
                recency.remove(name)
                del sizes[name]
        adapter_cache.check_integrity()
        allocator.check_integrity()
