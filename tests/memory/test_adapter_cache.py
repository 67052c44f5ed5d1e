"""Adapter residency: LRU eviction, pinning, reservations, and no eviction without a successful allocation."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlora.memory.adapter_cache import Residency
from vlora.memory.books import ArenaBooks, Run


def make(num_pages: int = 20, max_pages: int = 10) -> Residency:
    return Residency(ArenaBooks(num_pages, 2), max_pages)


def test_the_least_recently_used_adapter_leaves_first() -> None:
    residency = make()
    for name in ("a", "b", "c"):
        residency.bring(name, 3)
    residency.touch("a")
    assert residency.bring("d", 3) == Run(3, 3)
    assert residency.drain_evicted() == ("b",)
    assert residency.drain_evicted() == ()
    assert residency.resident == {"a", "c", "d"}
    residency.check_integrity()


def test_bringing_a_resident_adapter_only_touches_it() -> None:
    residency = make()
    for name in ("a", "b", "c"):
        residency.bring(name, 3)
    assert residency.bring("a", 3) == residency.run("a") == Run(0, 3)
    residency.bring("d", 3)
    assert residency.drain_evicted() == ("b",)


def test_a_pinned_adapter_stays_until_unpinned_as_often_as_pinned() -> None:
    residency = make(max_pages=4)
    residency.bring("a", 4)
    residency.pin("a")
    residency.pin("a")
    assert residency.bring("b", 1) is None
    residency.unpin("a")
    assert residency.bring("b", 1) is None
    residency.unpin("a")
    assert residency.bring("b", 1) == Run(0, 1)
    residency.check_integrity()


def test_nobody_is_evicted_for_an_adapter_that_does_not_fit_anyway() -> None:
    residency = make()
    residency.bring("cold", 2)
    residency.bring("pinned", 4)
    residency.pin("pinned")
    assert residency.bring("large", 5) is None, "2 free pages before the pinned run and 4 after it hold no run of 5"
    assert residency.bring("larger", 11) is None
    assert residency.resident == {"cold", "pinned"} and residency.drain_evicted() == ()


def test_a_crowd_that_finds_no_room_is_told_so_without_searching_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    residency = make(max_pages=4)
    residency.bring("a", 4)
    residency.pin("a")
    searches: list[object] = []
    search = residency.room_beside

    def counted(kept: Iterable[Run]) -> int:
        searches.append(kept)
        return search(kept)

    monkeypatch.setattr(residency, "room_beside", counted)
    assert all(residency.bring(f"b{number}", 1 + number % 4) is None for number in range(100)) and len(searches) == 1
    residency.unpin("a")
    assert residency.bring("b", 4) == Run(0, 4) and len(searches) == 1
    residency.pin("b")
    assert residency.bring("c", 1) is None and len(searches) == 2


def test_only_as_many_leave_as_must() -> None:
    residency = make(max_pages=8)
    for name in ("a", "b", "c", "d"):
        residency.bring(name, 2)
    residency.bring("e", 4)
    assert residency.drain_evicted() == ("a", "b")


def test_adapters_never_cross_their_line() -> None:
    residency = make(num_pages=20, max_pages=6)
    residency.bring("a", 4)
    residency.pin("a")
    assert residency.bring("b", 3) is None, "pages 6 to 19 are free but beyond the adapters' share"
    assert residency.books.num_free_blocks == 8


def test_kv_blocks_in_the_adapters_part_are_in_the_way_but_never_overwritten() -> None:
    residency = make(num_pages=8, max_pages=4)
    blocks = [residency.books.take_block() for _ in range(3)]
    assert residency.bring("a", 3) is None
    residency.books.return_block(blocks[-1] or 0)
    assert residency.bring("a", 3) == Run(0, 3)
    residency.books.check_integrity()


def test_reserved_pages_count_in_the_share_and_are_not_evicted() -> None:
    residency = make(max_pages=6)
    residency.bring("a", 3)
    reserved = residency.reserve(2)
    assert reserved == Run(3, 2)
    assert residency.reserve(2) is None, "reserving evicts no adapter"
    assert residency.bring("b", 4) is None
    assert residency.num_pages == 5
    residency.release(reserved)
    assert residency.bring("b", 4) is not None
    residency.check_integrity()


def test_a_pinned_adapter_may_not_be_dropped() -> None:
    residency = make()
    residency.bring("a", 1)
    residency.pin("a")
    with pytest.raises(AssertionError, match="pinned"):
        residency.drop("a")
    residency.unpin("a")
    residency.drop("a")
    assert residency.books.num_free_blocks == 10
    with pytest.raises(AssertionError, match="not resident"):
        residency.pin("a")


def test_the_proof_fails_when_a_run_is_not_accounted_for() -> None:
    residency = make()
    residency.bring("a", 2)
    residency.check_integrity()
    residency.books.allocate_run(1)
    with pytest.raises(AssertionError, match="ArenaBooks lists 2"):
        residency.check_integrity()


@given(
    max_pages=st.integers(1, 16),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["bring", "touch", "pin", "unpin", "drop", "take", "return"]),
            st.sampled_from("abcdef"),
            st.integers(1, 7),
        ),
        max_size=60,
    ),
)
def test_any_sequence_of_use_keeps_the_sums_and_the_promises(
    max_pages: int, actions: list[tuple[str, str, int]]
) -> None:
    residency = Residency(ArenaBooks(24, 2), max_pages)
    books = residency.books
    sizes: dict[str, int] = {}
    pins: list[str] = []
    recency: list[str] = []
    blocks: list[int] = []
    for action, name, number in actions:
        if action == "bring":
            before = residency.resident
            run = residency.bring(name, sizes.get(name, number))
            evicted = residency.drain_evicted()
            assert not set(evicted) & set(pins), "a pinned adapter was evicted"
            assert list(evicted) == [n for n in recency if n not in pins][: len(evicted)], "not evicted in LRU order"
            if run is None:
                assert residency.resident == before
            else:
                assert run.num_pages == sizes.setdefault(name, number) and run.end <= max_pages
                assert residency.resident == (before - set(evicted)) | {name}
                recency = [n for n in recency if n not in evicted and n != name] + [name]
            for gone in evicted:
                del sizes[gone]
        elif action == "take":
            block = books.take_block()
            blocks += [] if block is None else [block]
        elif action == "return" and blocks:
            books.return_block(blocks.pop(number % len(blocks)))
        elif name in residency.resident:
            if action == "touch":
                residency.touch(name)
                recency = [n for n in recency if n != name] + [name]
            elif action == "pin":
                residency.pin(name)
                pins.append(name)
            elif action == "unpin" and name in pins:
                residency.unpin(name)
                pins.remove(name)
            elif action == "drop" and name not in pins:
                residency.drop(name)
                recency.remove(name)
                del sizes[name]
        residency.check_integrity()
        books.check_integrity()
