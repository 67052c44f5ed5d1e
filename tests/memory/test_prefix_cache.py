"""Prefix cache: keys cover all inputs of the KV; shared blocks are counted, cached and evicted in order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlora.memory.adapter_cache import Residency
from vlora.memory.books import ArenaBooks, BlockTables
from vlora.memory.prefix_cache import Key, PrefixCache, TokenChain
from vlora.types import Request, VisionInput

IMAGE, VIDEO = 90, 91
PLACEHOLDERS = {"image": IMAGE, "video": VIDEO}


def make_request(*tokens: int, adapter: str | None = None, shown: tuple[tuple[str, str, int], ...] = ()) -> Request:
    """`shown`: (kind, content, placeholders) of each image or video."""
    vision = tuple(
        VisionInput(kind=kind, content_hash=content, num_tokens=count, fields={})  # type: ignore[arg-type]
        for kind, content, count in shown
    )
    return Request(request_id="r", prompt_ids=tokens, adapter=adapter, vision=vision)


def keys(request: Request, block_size: int = 4) -> list[Key]:
    chain = TokenChain(request, block_size, PLACEHOLDERS)
    return [chain.key(place) for place in range(len(request.prompt_ids) // block_size)]


def tables_of(num_blocks: int, block_size: int = 2) -> BlockTables:
    prefix = PrefixCache({})
    return BlockTables(ArenaBooks(num_blocks, 1, displaced=prefix.drop), block_size, prefix)


def start(tables: BlockTables, name: str, *tokens: int) -> tuple[int, TokenChain]:
    """Reuse known blocks, compute and register the rest; return the number of reused tokens."""
    request = make_request(*tokens)
    chain = tables.chain(request)
    assert chain is not None
    found = tables.reuse(name, chain, 0, len(tokens))
    assert tables.grow(name, len(tokens))
    tables.learn(name, chain, found, len(tokens))
    tables.check_integrity()
    return found, chain


# -- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_stands_for_all_tokens_up_to_its_block_s_end() -> None:
    one = keys(make_request(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert len(one) == 2 and all(len(key) == 16 for key in one)
    assert one == keys(make_request(1, 2, 3, 4, 5, 6, 7, 8, 0)), "a partial block has no key"
    other = keys(make_request(0, 2, 3, 4, 5, 6, 7, 8, 9))
    assert not set(one) & set(other), "the second blocks have the same tokens but different prefixes"


def test_adapters_and_their_versions_share_nothing() -> None:
    tokens = (1, 2, 3, 4)
    made = [keys(make_request(*tokens, adapter=name))[0] for name in (None, "a@1", "a@2", "b@1")]
    assert len(set(made)) == 4


def test_placeholders_stand_for_what_they_show() -> None:
    def shown(*items: tuple[str, str, int], tokens: tuple[int, ...] = (1, IMAGE, IMAGE, IMAGE) * 2) -> list[Key]:
        return keys(make_request(*tokens, shown=items))

    cat = shown(("image", "cat", 6))
    assert cat == shown(("image", "cat", 6))
    assert cat[0] != shown(("image", "dog", 6))[0]
    twice = shown(("image", "cat", 3), ("image", "cat", 3))
    assert cat[0] == twice[0] and cat[1] != twice[1], "the second blocks: the rest of one image, the start of another"
    assert shown(("image", "cat", 3), ("image", "dog", 3))[1] != twice[1]
    split = (shown(("image", "cat", 2), ("image", "dog", 4)), shown(("image", "cat", 1), ("image", "dog", 5)))
    assert split[0][0] != split[1][0]


def test_images_and_videos_are_told_apart_in_one_block() -> None:
    tokens = (IMAGE, VIDEO, VIDEO, IMAGE)
    items = (("image", "x", 2), ("video", "y", 2))
    swapped = (("image", "y", 2), ("video", "x", 2))
    assert keys(make_request(*tokens, shown=items)) == keys(make_request(*tokens, shown=items[::-1]))
    assert keys(make_request(*tokens, shown=items)) != keys(make_request(*tokens, shown=swapped))


def test_an_answer_continues_the_chain_as_the_next_turn_s_prompt_will() -> None:
    chain = TokenChain(make_request(1, 2, 3, IMAGE, 5, shown=(("image", "cat", 1),)), 4, PLACEHOLDERS)
    first = chain.key(0)
    with pytest.raises(AssertionError, match="before its tokens were known"):
        chain.key(1)
    for token in (6, 7, 8):
        chain.append(token)
    turn = make_request(1, 2, 3, IMAGE, 5, 6, 7, 8, 9, shown=(("image", "cat", 1),))
    assert [first, chain.key(1)] == keys(turn)


def test_a_placeholder_that_was_sampled_stands_for_nothing() -> None:
    chain = TokenChain(make_request(1, 2), 4, PLACEHOLDERS)
    chain.append(IMAGE)
    chain.append(4)
    assert chain.key(0) != keys(make_request(1, 2, IMAGE, 4, shown=(("image", "cat", 1),)))[0]


# -- blocks -----------------------------------------------------------------------------------------------------------


def test_a_second_request_shares_full_blocks_and_computes_its_last_token() -> None:
    tables = tables_of(8)
    assert start(tables, "a", 1, 2, 3, 4, 5)[0] == 0
    assert start(tables, "b", 1, 2, 3, 4, 9)[0] == 4
    assert tables.table("a")[:2] == tables.table("b")[:2] and tables.table("a")[2] != tables.table("b")[2]
    assert start(tables, "c", 1, 2, 3, 4)[0] == 2, "all four tokens are known, but the last one is always computed"
    assert tables.num_free_blocks == 8 - 3 - 1 - 1
    assert [tables.num_users(block) for block in tables.table("a")] == [3, 2, 1]


def test_blocks_of_ended_requests_are_kept_and_count_as_free() -> None:
    tables = tables_of(3)
    start(tables, "a", 1, 2, 3, 4, 5)
    held = tables.table("a")
    tables.free("a")
    assert tables.num_cached_blocks == 2 and tables.num_free_blocks == 3
    assert start(tables, "b", 1, 2, 3, 4, 6)[0] == 4
    assert tables.table("b")[:2] == held[:2]
    assert tables.num_cached_blocks == 0


def test_the_least_recently_used_leaves_first_and_of_one_prompt_the_end_before_the_beginning() -> None:
    tables = tables_of(6)
    chains = []
    for name, first in (("a", 10), ("b", 20)):
        chains.append(start(tables, name, first, 1, 2, 3, 4)[1])
        tables.free(name)
    old = [chains[0].key(place) for place in (0, 1)]
    new = [chains[1].key(place) for place in (0, 1)]
    for lost in ([], [], [old[1]], [old[1], old[0]], [old[1], old[0], new[1]]):
        tables.grow("x", len(tables.table("x")) * 2 + 2)
        assert tables.known == {*old, *new} - set(lost)


def test_a_shared_block_goes_only_with_its_last_user() -> None:
    tables = tables_of(4)
    start(tables, "a", 1, 2, 3)
    start(tables, "b", 1, 2, 4)
    (shared, _), _ = tables.table("a"), tables.free("a")
    assert tables.num_users(shared) == 1 and tables.num_cached_blocks == 0
    assert not tables.grow("c", 2 * 3) and tables.grow("c", 2 * 2)
    assert shared not in tables.table("c")
    tables.check_integrity()


def test_a_block_that_was_only_begun_gives_way_to_a_known_one() -> None:
    tables = tables_of(4)
    request = make_request(1, 2, 3, 4, 5)
    slow = tables.chain(request)
    assert slow is not None and tables.grow("slow", 1)
    start(tables, "quick", 1, 2, 3, 4, 6)
    assert tables.num_free_blocks == 0
    assert tables.reuse("slow", slow, 1, 5) == 4
    assert tables.table("slow") == tables.table("quick")[:2]
    assert tables.num_free_blocks == 1 and tables.writable("slow", 4) and not tables.writable("slow", 3)
    tables.check_integrity()


def test_cached_blocks_give_way_to_an_adapter_s_run() -> None:
    prefix = PrefixCache({})
    books = ArenaBooks(6, 1, displaced=prefix.drop)
    tables, residency = BlockTables(books, 2, prefix), Residency(books, 3)
    start(tables, "a", *range(12))
    assert residency.bring("x", 2) is None, "the blocks are in use"
    tables.free("a")
    assert tables.num_cached_blocks == 6
    run = residency.bring("x", 2)
    assert run is not None and residency.drain_evicted() == ()
    assert tables.num_cached_blocks == tables.num_free_blocks == 4
    # The beginning is at the high end, where blocks are allocated first.
    assert start(tables, "a", *range(8))[0] == 6
    books.check_integrity()
    residency.check_integrity()


def test_a_free_gap_is_taken_before_cached_blocks_and_these_before_resident_adapters() -> None:
    prefix = PrefixCache({})
    books = ArenaBooks(8, 1, displaced=prefix.drop)
    tables, residency = BlockTables(books, 1, prefix), Residency(books, 8)
    start(tables, "a", *range(4))
    tables.free("a")
    assert residency.bring("x", 4) is not None and tables.num_cached_blocks == 4
    assert residency.bring("y", 3) is not None and residency.drain_evicted() == () and tables.num_cached_blocks == 1
    assert residency.bring("z", 3) is not None and residency.drain_evicted() == ("x",)
    tables.check_integrity()


def test_forgetting_a_version_leaves_nothing_to_be_found() -> None:
    tables = tables_of(8)
    chains = {}
    for adapter in ("a@1", "a@2"):
        chains[adapter] = tables.chain(make_request(1, 2, 3, 4, 5, adapter=adapter))
        chain = chains[adapter]
        assert chain is not None and tables.grow(adapter, 4)
        tables.learn(adapter, chain, 0, 4)
    tables.free("a@1")
    tables.forget("a@1")
    tables.forget("a@2")  # still in use: no longer found, and freed afterwards
    tables.check_integrity()
    assert tables.num_cached_blocks == 0 and not tables.known
    tables.free("a@2")
    assert tables.num_cached_blocks == 0 and tables.num_free_blocks == 8
    for adapter, chain in chains.items():
        assert chain is not None and tables.reuse(adapter, chain, 0, 5) == 0


def test_of_two_that_computed_the_same_the_first_is_kept() -> None:
    tables = tables_of(4)
    chains = [tables.chain(make_request(1, 2, 3)) for _ in range(2)]
    for name, chain in zip("ab", chains, strict=True):
        assert chain is not None and tables.reuse(name, chain, 0, 3) == 0 and tables.grow(name, 2)
    for name, chain in zip("ab", chains, strict=True):
        assert chain is not None
        tables.learn(name, chain, 0, 2)
        tables.check_integrity()
    tables.free("b")
    assert tables.num_cached_blocks == 0
    tables.free("a")
    assert tables.num_cached_blocks == 1


@pytest.mark.parametrize("spoilt", ["users", "known", "cached"])
def test_the_proof_fails_when_sharing_is_counted_wrongly(spoilt: str) -> None:
    tables = tables_of(6)
    for name, last in (("a", 3), ("b", 4)):
        start(tables, name, 1, 2, last)
    start(tables, "c", 7, 8, 9)
    tables.free("c")
    (shared, _), (cached,) = tables.table("a"), tables.books.cached_blocks
    assert tables._prefix is not None
    if spoilt == "users":
        tables._num_users[shared] += 1
    elif spoilt == "known":
        tables._prefix.learn(b"x", 0, None)  # a key of a block that was not computed
    else:
        tables._prefix.drop(cached)
    with pytest.raises(AssertionError):
        tables.check_integrity()


@pytest.mark.slow
@settings(max_examples=200)
@given(
    num_blocks=st.integers(4, 16),
    block_size=st.integers(1, 3),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["start", "start", "answer", "end", "end", "bring", "drop", "forget"]),
            st.integers(0, 5),
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
        ),
        max_size=40,
    ),
)
def test_no_block_is_lost_doubled_or_taken_for_another(
    num_blocks: int, block_size: int, actions: list[tuple[str, int, list[int]]]
) -> None:
    """Requests of two adapters start, continue and end while adapters are loaded and evicted.

    A model tracks the content of each block.
    """
    prefix = PrefixCache({})
    books = ArenaBooks(num_blocks, 1, displaced=prefix.drop)
    tables, residency = BlockTables(books, block_size, prefix), Residency(books, num_blocks // 2)
    chains: dict[str, TokenChain] = {}
    tokens: dict[str, list[int]] = {}
    holds: dict[int, object] = {}  # block -> adapter and tokens up to its end
    books.on_renamed(lambda block, target: holds.update({target: holds.get(block)}))

    def written(name: str, first: int) -> None:
        for place in range(first // block_size, len(tokens[name]) // block_size):
            block = tables.table(name)[place]
            assert tables.num_users(block) == 1, "a shared block was written"
            holds[block] = (chains[name].adapter, *tokens[name][: (place + 1) * block_size])

    for action, number, text in actions:
        name, adapter = f"r{number}", f"a{number % 2}"
        if action == "start" and name not in chains:
            chain = tables.chain(make_request(*text, adapter=adapter))
            assert chain is not None
            free = tables.num_free_blocks
            found = tables.reuse(name, chain, 0, len(text))
            assert found < len(text) and found % block_size == 0
            for place, block in enumerate(tables.table(name)):
                assert holds[block] == (adapter, *text[: (place + 1) * block_size]), "wrong content found"
            if tables.grow(name, len(text)):
                chains[name], tokens[name] = chain, list(text)
                written(name, found)
                tables.learn(name, chain, found, len(text))
            else:
                tables.free(name)
                assert tables.num_free_blocks == free
        elif action == "answer" and name in chains:
            if tables.grow(name, len(tokens[name]) + 1):
                tokens[name].append(text[0])
                chains[name].append(text[0])
                assert tables.writable(name, len(tokens[name]) - 1)
                written(name, len(tokens[name]) - 1)
                tables.learn(name, chains[name], len(tokens[name]) - 1, len(tokens[name]))
        elif action == "end" and name in chains:
            tables.free(name)
            del chains[name], tokens[name]
        elif action == "bring":
            residency.bring(name, len(text))
        elif action == "drop" and name in residency.resident:
            residency.drop(name)
        elif action == "forget":
            tables.forget(adapter)
            assert not prefix.blocks_of(adapter)
        for other, table in ((other, tables.table(other)) for other in chains):
            for place, block in enumerate(table[: len(tokens[other]) // block_size]):
                assert holds[block] == (chains[other].adapter, *tokens[other][: (place + 1) * block_size])
        tables.check_integrity()
        books.check_integrity()
        residency.check_integrity()
        used = set(itertools.chain.from_iterable(tables.table(other) for other in chains))
        assert len(used) + tables.num_free_blocks + books._blocks.count(1) == num_blocks
