"""The adapter cache: LRU eviction, pinning, reservations, and no eviction without a successful allocation."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.page_allocator import PageAllocator, PageRun


def make(num_pages: int = 20, max_pages: int = 10) -> AdapterCache:
    return AdapterCache(PageAllocator(num_pages, 2), max_pages)


def test_the_least_recently_used_adapter_leaves_first() -> None:
    adapter_cache = make()
    for name in ("a", "b", "c"):
        adapter_cache.allocate(name, 3)
    adapter_cache.touch("a")
    assert adapter_cache.allocate("d", 3) == PageRun(3, 3)
    assert adapter_cache.drain_evicted() == ("b",)
    assert adapter_cache.drain_evicted() == ()
    assert adapter_cache.resident == {"a", "c", "d"}
    adapter_cache.check_integrity()


def test_allocating_a_resident_adapter_only_marks_it_as_used() -> None:
    adapter_cache = make()
    for name in ("a", "b", "c"):
        adapter_cache.allocate(name, 3)
    assert adapter_cache.allocate("a", 3) == adapter_cache.run("a") == PageRun(0, 3)
    adapter_cache.allocate("d", 3)
    assert adapter_cache.drain_evicted() == ("b",)


def test_a_pinned_adapter_stays_until_unpinned_as_often_as_pinned() -> None:
    adapter_cache = make(max_pages=4)
    adapter_cache.allocate("a", 4)
    adapter_cache.pin("a")
    adapter_cache.pin("a")
    assert adapter_cache.allocate("b", 1) is None
    adapter_cache.unpin("a")
    assert adapter_cache.allocate("b", 1) is None
    adapter_cache.unpin("a")
    assert adapter_cache.allocate("b", 1) == PageRun(0, 1)
    adapter_cache.check_integrity()


def test_a_failing_allocation_evicts_nothing() -> None:
    adapter_cache = make()
    adapter_cache.allocate("cold", 2)
    adapter_cache.allocate("pinned", 4)
    adapter_cache.pin("pinned")
    assert adapter_cache.allocate("large", 5) is None, (
        "2 free pages before the pinned run and 4 after it hold no run of 5"
    )
    assert adapter_cache.allocate("larger", 11) is None
    assert adapter_cache.resident == {"cold", "pinned"} and adapter_cache.drain_evicted() == ()


def test_a_hundred_failing_allocations_search_for_room_once(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter_cache = make(max_pages=4)
    adapter_cache.allocate("a", 4)
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


def test_no_more_adapters_than_necessary_are_evicted() -> None:
    adapter_cache = make(max_pages=8)
    for name in ("a", "b", "c", "d"):
        adapter_cache.allocate(name, 2)
    adapter_cache.allocate("e", 4)
    assert adapter_cache.drain_evicted() == ("a", "b")


def test_adapters_stay_within_their_share() -> None:
    adapter_cache = make(num_pages=20, max_pages=6)
    adapter_cache.allocate("a", 4)
    adapter_cache.pin("a")
    assert adapter_cache.allocate("b", 3) is None, "pages 6 to 19 are free but beyond the adapters' share"
    assert adapter_cache.allocator.num_free_blocks == 8


def test_kv_blocks_in_the_adapters_share_are_never_overwritten() -> None:
    adapter_cache = make(num_pages=8, max_pages=4)
    blocks = [adapter_cache.allocator.allocate_block() for _ in range(3)]
    assert adapter_cache.allocate("a", 3) is None
    adapter_cache.allocator.free_block(blocks[-1] or 0)
    assert adapter_cache.allocate("a", 3) == PageRun(0, 3)
    adapter_cache.allocator.check_integrity()


def test_reserved_pages_count_in_the_share_and_are_not_evicted() -> None:
    adapter_cache = make(max_pages=6)
    adapter_cache.allocate("a", 3)
    reserved = adapter_cache.reserve(2)
    assert reserved == PageRun(3, 2)
    assert adapter_cache.reserve(2) is None, "reserving evicts no adapter"
    assert adapter_cache.allocate("b", 4) is None
    assert adapter_cache.num_pages == 5
    adapter_cache.release(reserved)
    assert adapter_cache.allocate("b", 4) is not None
    adapter_cache.check_integrity()


def test_freeing_a_pinned_adapter_fails() -> None:
    adapter_cache = make()
    adapter_cache.allocate("a", 1)
    adapter_cache.pin("a")
    with pytest.raises(AssertionError, match="pinned"):
        adapter_cache.free("a")
    adapter_cache.unpin("a")
    adapter_cache.free("a")
    assert adapter_cache.allocator.num_free_blocks == 10
    with pytest.raises(AssertionError, match="not resident"):
        adapter_cache.pin("a")


def test_the_integrity_check_finds_an_unaccounted_run() -> None:
    adapter_cache = make()
    adapter_cache.allocate("a", 2)
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
