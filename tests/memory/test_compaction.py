"""Compaction: runs and blocks move with their content, and the cheapest plan is used."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.orchestrator.simulation import make_request
from vlora.memory.adapter_cache import Residency
from vlora.memory.arena import PAGE_BYTES, Arena
from vlora.memory.books import ArenaBooks, BlockTables, Run
from vlora.memory.compaction import Plan, plan_room
from vlora.memory.prefix_cache import PrefixCache, TokenChain


class Bytes:
    """A model of the arena's content: a label per page, copied as `ArenaBooks` requests."""

    def __init__(self, num_pages: int) -> None:
        self.pages: list[object] = [None] * num_pages
        self.num_copied = 0

    def copy(self, first: int, target: int, num_pages: int) -> None:
        self.pages[target : target + num_pages] = self.pages[first : first + num_pages]
        self.num_copied += num_pages

    def write(self, run: Run, label: object) -> None:
        self.pages[run.first_page : run.end] = [(label, place) for place in range(run.num_pages)]

    def holds(self, run: Run, label: object) -> bool:
        return self.pages[run.first_page : run.end] == [(label, place) for place in range(run.num_pages)]


def make(num_pages: int, max_pages: int, pages_per_block: int = 1) -> tuple[Residency, Bytes]:
    content = Bytes(num_pages)
    return Residency(ArenaBooks(num_pages, pages_per_block, copy=content.copy), max_pages), content


# -- single scenarios -------------------------------------------------------------------------------------------------


def test_a_small_adapter_moves_where_a_large_one_finds_no_gap() -> None:
    residency, content = make(20, 10)
    for name, pages in (("a", 3), ("small", 1), ("b", 3), ("c", 3)):
        residency.bring(name, pages)
    residency.touch("small")
    content.write(residency.run("small"), "small")
    residency.drop("a")
    residency.drop("b")
    # Free: pages 0 to 2 and 4 to 6. Without moving, the three pages of c would have to be evicted.
    assert residency.bring("large", 6) == Run(0, 6)
    assert residency.resident == {"small", "c", "large"} and residency.drain_evicted() == ()
    assert residency.drain_moved() == ("small",) and residency.drain_moved() == ()
    assert residency.run("small") == Run(6, 1) and content.holds(Run(6, 1), "small")
    assert content.num_copied == 1
    residency.check_integrity()
    residency.books.check_integrity()


def test_a_run_slides_over_the_place_it_leaves() -> None:
    residency, content = make(20, 17)
    for name, pages in (("gone", 1), ("a", 4), ("gap", 2), ("pinned", 1), ("cold", 9)):
        residency.bring(name, pages)
    residency.pin("pinned")
    residency.touch("a")
    content.write(residency.run("a"), "a")
    for name in ("gone", "gap"):
        residency.drop(name)
    assert residency.bring("b", 3) == Run(0, 3) and residency.drain_evicted() == ()
    assert residency.run("a") == Run(3, 4) and content.holds(Run(3, 4), "a")


def test_blocks_in_use_leave_the_adapters_part() -> None:
    residency, content = make(8, 4)
    tables = BlockTables(residency.books, block_size=1)
    tables.grow("early", 4)  # the high end
    tables.grow("r", 2)
    for place, block in enumerate(tables.table("r")):
        content.write(residency.books.pages_of(block), place)
    tables.free("early")
    assert tables.table("r") == (3, 2)
    assert residency.bring("a", 4) == Run(0, 4)
    assert tables.table("r") == (6, 7) or tables.table("r") == (7, 6)
    assert all(content.holds(residency.books.pages_of(block), place) for place, block in enumerate(tables.table("r")))
    tables.check_integrity()
    residency.books.check_integrity()


def test_what_is_pinned_or_in_use_with_nowhere_to_go_stays_and_the_newcomer_waits() -> None:
    residency, content = make(8, 4)
    residency.bring("gone", 1)
    residency.bring("pinned", 2)
    residency.pin("pinned")
    residency.drop("gone")
    assert residency.bring("a", 2) is None, "one free page on each side of the pinned one"
    residency.unpin("pinned")
    blocks = [residency.books.take_block() for _ in range(6)]
    assert blocks == [7, 6, 5, 4, 3, 0]
    assert residency.bring("b", 3) is None, "no free place for block 0"
    assert residency.resident == {"pinned"} and content.num_copied == 0
    residency.books.return_block(7)
    assert residency.bring("b", 3) == Run(0, 3) and residency.drain_evicted() == ("pinned",)
    assert residency.books.taken_blocks == {7, 6, 5, 4, 3} and content.num_copied == 1


def test_the_way_that_costs_fewer_pages_is_taken() -> None:
    residency, content = make(30, 12)
    for name, pages in (("cold", 1), ("x", 1), ("large", 8), ("y", 2)):
        residency.bring(name, pages)
    residency.drop("x")
    # Free: page 1. Moving the cold adapter's page would make room, but evicting it is cheaper.
    assert residency.bring("b", 2) == Run(0, 2)
    assert residency.drain_evicted() == ("cold",) and content.num_copied == 0


def test_a_cached_block_in_the_way_keeps_what_it_holds() -> None:
    content = Bytes(8)
    prefix = PrefixCache({})
    books = ArenaBooks(8, 1, displaced=prefix.drop, copy=content.copy)
    residency, tables = Residency(books, 4), BlockTables(books, 2, prefix)
    tables.grow("early", 8)  # blocks 7 to 4
    request = make_request("r", prompt=5)
    chain = TokenChain(request, 2, {})
    assert tables.grow("r", 5)  # blocks 3, 2, 1
    content.write(books.pages_of(3), "first")
    tables.learn("r", chain, 0, 4)
    tables.free("early")
    tables.free("r")
    assert books.cached_blocks == {3, 2}
    assert residency.bring("a", 4) == Run(0, 4)
    assert books.cached_blocks == {7, 6} and len(prefix.keys) == 2
    assert tables.reuse("again", TokenChain(request, 2, {}), 0, 5) == 4
    assert content.holds(books.pages_of(tables.table("again")[0]), "first")
    tables.check_integrity()
    books.check_integrity()
    # With no free block, a block in use replaces the least recently used cached block, which is discarded.
    residency.drop("a")
    tables.free("again")
    tables.grow("all", 12)
    assert residency.bring("b", 3) is None, "six blocks in use and three pages exceed eight pages"
    assert residency.bring("c", 2) is not None and len(prefix.keys) == 0
    tables.check_integrity()
    books.check_integrity()


# -- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=300)
@given(
    max_pages=st.integers(1, 16),
    pages_per_block=st.integers(1, 3),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["bring", "bring", "drop", "pin", "unpin", "grow", "grow", "free"]),
            st.sampled_from("abcdef"),
            st.integers(1, 7),
        ),
        max_size=60,
    ),
)
def test_contents_follow_wherever_things_go(
    max_pages: int, pages_per_block: int, actions: list[tuple[str, str, int]]
) -> None:
    content = Bytes(24)
    prefix = PrefixCache({})
    books = ArenaBooks(24, pages_per_block, displaced=prefix.drop, copy=content.copy)
    residency, tables = Residency(books, max_pages), BlockTables(books, 2, prefix)
    sizes = dict(zip("abcdef", (1, 2, 3, 4, 5, 7), strict=True))
    pins: list[str] = []
    known: dict[bytes, object] = {}  # expected content of the cached blocks
    for number, (action, name, size) in enumerate(actions):
        before = {other: residency.run(other) for other in residency.resident}
        if action == "bring":
            copied, tables_before = content.num_copied, {r: tables.table(r) for r in tables.holders}
            cached = dict(prefix._blocks)
            run = residency.bring(name, sizes[name])
            evicted, moved = residency.drain_evicted(), residency.drain_moved()
            assert not {*evicted, *moved} & set(pins), "a pinned adapter moved or left"
            assert {n for n in before if n not in evicted and residency.run(n) != before[n]} == set(moved)
            assert all(len(tables.table(r)) == len(table) for r, table in tables_before.items())
            if run is None:
                assert copied == content.num_copied and not evicted and cached == prefix._blocks, (
                    "a failed allocation moved, evicted or discarded content"
                )
            elif name not in before:
                content.write(run, name)
        elif action == "drop" and name in before and name not in pins:
            residency.drop(name)
        elif action == "pin" and name in before:
            residency.pin(name)
            pins.append(name)
        elif action == "unpin" and name in pins:
            residency.unpin(name)
            pins.remove(name)
        elif action == "grow" and tables.grow(name, 2 * size) and name not in known:
            for place, block in enumerate(tables.table(name)):
                content.write(books.pages_of(block), (name, place))
        elif action == "free" and tables.table(name):
            # Keep some of the computed blocks in the cache, under distinct prompts.
            table = tables.table(name)
            chain = TokenChain(make_request("r", prompt=tuple(range(number + 1, number + 2 + 2 * len(table)))), 2, {})
            if size > 3:
                tables.learn(name, chain, 0, 2 * len(table))
                known.update({chain.key(place): (name, place) for place in range(len(table))})
            tables.free(name)
        for other in residency.resident:
            assert content.holds(residency.run(other), other), f"the content of {other} is lost"
        for holder in tables.holders:
            for place, block in enumerate(tables.table(holder)):
                assert content.holds(books.pages_of(block), (holder, place)), "KV content is lost"
        for key, block in prefix._blocks.items():
            assert content.holds(books.pages_of(block), known[key]), "a known block has other content"
        residency.check_integrity()
        tables.check_integrity()
        books.check_integrity()


def test_nobody_who_fits_in_pages_waits_while_nothing_is_pinned() -> None:
    """Adapters of at most one page less than the free pages always fit, for any fragmentation."""
    for seed in range(40):
        draws = random.Random(seed)
        residency, _ = make(40, 20)
        names = [f"a{i}" for i in range(12)]
        for name in names:
            residency.bring(name, draws.randint(1, 3))
        for name in draws.sample(sorted(residency.resident), k=5):
            residency.drop(name)
        residency.drain_evicted()
        room = 20 - residency.num_pages
        assert residency.bring("new", room) is not None
        residency.books.check_integrity()
        if room <= 20 - room:
            assert residency.resident >= {"new"}


@pytest.mark.parametrize(("first", "target", "size"), [(2, 0, 5), (0, 3, 5), (1, 2, 4), (4, 4, 3), (0, 6, 4)])
def test_the_arena_copies_over_itself(first: int, target: int, size: int) -> None:
    arena = Arena(10, torch.device("cpu"))
    arena.bytes.copy_(torch.arange(10 * PAGE_BYTES, dtype=torch.int64).remainder(251).to(torch.uint8))
    wanted = arena.buffer(first, size).clone()
    outside = arena.bytes.clone()
    arena.copy(first, target, size)
    assert torch.equal(arena.buffer(target, size), wanted)
    outside[target * PAGE_BYTES : (target + size) * PAGE_BYTES] = wanted
    assert torch.equal(arena.bytes, outside), "pages outside the target were modified"
    assert arena.num_copied == (size if first != target else 0)


def test_a_plan_changes_nothing() -> None:
    books = ArenaBooks(12, 2)
    gone, run = books.allocate_run(2), books.allocate_run(3)
    books.take_block()
    assert gone is not None and run is not None
    before = (books.runs, books.taken_blocks, books.page_map())
    plan = plan_room(books, 5, 8, [run], [gone])
    assert plan == Plan(0, (), ((run, 5),), (), 3)
    assert (books.runs, books.taken_blocks, books.page_map()) == before
