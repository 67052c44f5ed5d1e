"""The blocks of requests: growth and freeing; keys that cover all inputs of the KV; sharing, caching and eviction."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.block_manager import BlockManager, WrittenBlocks
from vlora.memory.page_allocator import PageAllocator
from vlora.memory.prefix_cache import Key, PrefixCache, TokenChain
from vlora.types import Request, VisionInput

IMAGE, VIDEO = 90, 91
PLACEHOLDERS = {"image": IMAGE, "video": VIDEO}


def make_request(
    *tokens: int, adapter: str | None = None, begin: int = 0, shown: tuple[tuple[str, str, int], ...] = ()
) -> Request:
    """`shown`: (kind, content, placeholders) of each image or video."""
    vision = tuple(
        VisionInput(kind=kind, content_hash=content, num_tokens=count, fields={})  # type: ignore[arg-type]
        for kind, content, count in shown
    )
    return Request(request_id="r", prompt_ids=tokens, adapter=adapter, vision=vision, adapter_from=begin)


def keys(request: Request, block_size: int = 4) -> list[Key]:
    chain = TokenChain(request, block_size, PLACEHOLDERS)
    return [chain.key(place) for place in range(len(request.prompt_ids) // block_size)]


def make_block_manager(num_blocks: int, block_size: int = 2, prefix: PrefixCache | None = None) -> BlockManager:
    prefix = prefix or PrefixCache({})
    return BlockManager(PageAllocator(num_blocks, 1, on_evict=prefix.remove), block_size, prefix)


def start(block_manager: BlockManager, name: str, *tokens: int) -> tuple[int, TokenChain]:
    """Reuse known blocks, compute and register the rest; return the number of reused tokens."""
    request = make_request(*tokens)
    chain = block_manager.chain(request)
    assert chain is not None
    found = block_manager.reuse(name, chain, 0, len(tokens))
    assert block_manager.grow(name, len(tokens))
    block_manager.register_full_blocks(name, chain, found, len(tokens))
    block_manager.check_integrity()
    return found, chain


# -- tables of blocks -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("twice", "message"), [(True, "but counted"), (False, "are taken")])
def test_the_integrity_check_finds_blocks_that_are_lost_or_allocated_twice(
    twice: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_manager = BlockManager(PageAllocator(4, 1), block_size=1)
    block_manager.grow("a", 2)
    block_manager.check_integrity()
    if twice:
        monkeypatch.setattr(block_manager.allocator, "allocate_block", lambda: block_manager.table("a")[0])
        block_manager.grow("b", 1)
    else:
        block_manager.allocator.allocate_block()
    with pytest.raises(AssertionError, match=message):
        block_manager.check_integrity()


# -- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_covers_all_tokens_up_to_the_end_of_its_block() -> None:
    one = keys(make_request(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert len(one) == 2 and all(len(key) == 16 for key in one)
    assert one == keys(make_request(1, 2, 3, 4, 5, 6, 7, 8, 0)), "a partial block has no key"
    other = keys(make_request(0, 2, 3, 4, 5, 6, 7, 8, 9))
    assert not set(one) & set(other), "the second blocks have the same tokens but different prefixes"


def test_adapters_and_their_versions_have_different_keys() -> None:
    tokens = (1, 2, 3, 4)
    made = [keys(make_request(*tokens, adapter=name))[0] for name in (None, "a@1", "a@2", "b@1")]
    assert len(set(made)) == 4


def test_keys_depend_on_the_token_where_the_adapter_begins() -> None:
    base = keys(make_request(*range(12)))
    made = [keys(make_request(*range(12), adapter="a@1", begin=begin)) for begin in range(12)]
    for place, key in enumerate(base):
        assert all(found[place] == key for begin, found in enumerate(made) if begin >= 4 * (place + 1))
        assert len({found[place] for found in made[: 4 * (place + 1)]} - {key}) == 4 * (place + 1)


def test_keys_depend_on_the_content_of_placeholders() -> None:
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


def test_keys_distinguish_images_from_videos_in_one_block() -> None:
    tokens = (IMAGE, VIDEO, VIDEO, IMAGE)
    items = (("image", "x", 2), ("video", "y", 2))
    swapped = (("image", "y", 2), ("video", "x", 2))
    assert keys(make_request(*tokens, shown=items)) == keys(make_request(*tokens, shown=items[::-1]))
    assert keys(make_request(*tokens, shown=items)) != keys(make_request(*tokens, shown=swapped))


def test_keys_of_an_answer_equal_those_of_the_next_turns_prompt() -> None:
    chain = TokenChain(make_request(1, 2, 3, IMAGE, 5, shown=(("image", "cat", 1),)), 4, PLACEHOLDERS)
    first = chain.key(0)
    with pytest.raises(AssertionError, match="before its tokens were known"):
        chain.key(1)
    for token in (6, 7, 8):
        chain.append(token)
    turn = make_request(1, 2, 3, IMAGE, 5, 6, 7, 8, 9, shown=(("image", "cat", 1),))
    assert [first, chain.key(1)] == keys(turn)


def test_a_sampled_placeholder_represents_no_image() -> None:
    chain = TokenChain(make_request(1, 2), 4, PLACEHOLDERS)
    chain.append(IMAGE)
    chain.append(4)
    assert chain.key(0) != keys(make_request(1, 2, IMAGE, 4, shown=(("image", "cat", 1),)))[0]


# -- blocks -----------------------------------------------------------------------------------------------------------


def test_cached_blocks_are_evicted_in_lru_order_the_end_of_a_prompt_first() -> None:
    block_manager = make_block_manager(6)
    chains = []
    for name, first in (("a", 10), ("b", 20)):
        chains.append(start(block_manager, name, first, 1, 2, 3, 4)[1])
        block_manager.free(name)
    old = [chains[0].key(place) for place in (0, 1)]
    new = [chains[1].key(place) for place in (0, 1)]
    for lost in ([], [], [old[1]], [old[1], old[0]], [old[1], old[0], new[1]]):
        block_manager.grow("x", len(block_manager.table("x")) * 2 + 2)
        assert block_manager.known == {*old, *new} - set(lost)


def test_a_known_block_replaces_a_partially_filled_one() -> None:
    block_manager = make_block_manager(4)
    request = make_request(1, 2, 3, 4, 5)
    slow = block_manager.chain(request)
    assert slow is not None and block_manager.grow("slow", 1)
    start(block_manager, "quick", 1, 2, 3, 4, 6)
    assert block_manager.num_free_blocks == 0
    assert block_manager.reuse("slow", slow, 1, 5) == 4
    assert block_manager.table("slow") == block_manager.table("quick")[:2]
    assert (
        block_manager.num_free_blocks == 1
        and block_manager.writable("slow", 4)
        and not block_manager.writable("slow", 3)
    )
    block_manager.check_integrity()


def test_allocation_prefers_free_pages_then_cached_blocks_then_adapters() -> None:
    prefix = PrefixCache({})
    allocator = PageAllocator(8, 1, on_evict=prefix.remove)
    block_manager, adapter_cache = BlockManager(allocator, 1, prefix), AdapterCache(allocator, 8)
    start(block_manager, "a", *range(4))
    block_manager.free("a")
    assert adapter_cache.allocate("x", 4) is not None and block_manager.num_cached_blocks == 4
    assert (
        adapter_cache.allocate("y", 3) is not None
        and adapter_cache.drain_evicted() == ()
        and block_manager.num_cached_blocks == 1
    )
    assert adapter_cache.allocate("z", 3) is not None and adapter_cache.drain_evicted() == ("x",)
    block_manager.check_integrity()


def test_no_block_of_a_forgotten_version_is_found() -> None:
    block_manager = make_block_manager(8)
    chains = {}
    for adapter in ("a@1", "a@2"):
        chains[adapter] = block_manager.chain(make_request(1, 2, 3, 4, 5, adapter=adapter))
        chain = chains[adapter]
        assert chain is not None and block_manager.grow(adapter, 4)
        block_manager.register_full_blocks(adapter, chain, 0, 4)
    block_manager.free("a@1")
    block_manager.forget("a@1")
    block_manager.forget("a@2")  # still in use: no longer found, and freed afterwards
    block_manager.check_integrity()
    assert block_manager.num_cached_blocks == 0 and not block_manager.known
    block_manager.free("a@2")
    assert block_manager.num_cached_blocks == 0 and block_manager.num_free_blocks == 8
    for adapter, chain in chains.items():
        assert chain is not None and block_manager.reuse(adapter, chain, 0, 5) == 0


def test_of_two_blocks_with_equal_content_the_first_is_kept() -> None:
    block_manager = make_block_manager(4)
    chains = [block_manager.chain(make_request(1, 2, 3)) for _ in range(2)]
    for name, chain in zip("ab", chains, strict=True):
        assert chain is not None and block_manager.reuse(name, chain, 0, 3) == 0 and block_manager.grow(name, 2)
    for name, chain in zip("ab", chains, strict=True):
        assert chain is not None
        block_manager.register_full_blocks(name, chain, 0, 2)
        block_manager.check_integrity()
    block_manager.free("b")
    assert block_manager.num_cached_blocks == 0
    block_manager.free("a")
    assert block_manager.num_cached_blocks == 1


@pytest.mark.parametrize("corrupted", ["users", "known", "cached"])
def test_the_integrity_check_finds_wrong_user_counts(corrupted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = PrefixCache({})
    block_manager = make_block_manager(6, prefix=prefix)
    for name, last in (("a", 3), ("b", 4)):
        start(block_manager, name, 1, 2, last)
    start(block_manager, "c", 7, 8, 9)
    block_manager.free("c")
    (shared, _), (cached,) = block_manager.table("a"), block_manager.allocator.cached_blocks
    if corrupted == "users":
        monkeypatch.setattr(block_manager.allocator, "allocate_block", lambda: shared)
        block_manager.grow("c", 1)
    elif corrupted == "known":
        prefix.add(b"x", 0, None)  # a key of a block that was not computed
    else:
        prefix.remove(cached)
    with pytest.raises(AssertionError):
        block_manager.check_integrity()


@pytest.mark.slow
@settings(max_examples=scaled(200))
@given(
    num_blocks=st.integers(4, 16),
    block_size=st.integers(1, 3),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["start", "start", "answer", "end", "end", "load", "evict", "forget"]),
            st.integers(0, 5),
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
        ),
        max_size=40,
    ),
)
def test_blocks_are_never_lost_duplicated_or_mixed_up(
    num_blocks: int, block_size: int, actions: list[tuple[str, int, list[int]]]
) -> None:
    """Requests of two adapters start, continue and end while adapters are loaded and evicted.

    Some adapters begin in the middle of a prompt. A model tracks the content of each block: for every token up to its
    end, the token and the adapter that is active for it.
    """
    prefix = PrefixCache({})
    allocator = PageAllocator(num_blocks, 1, on_evict=prefix.remove)
    block_manager, adapter_cache = BlockManager(allocator, block_size, prefix), AdapterCache(allocator, num_blocks // 2)
    chains: dict[str, TokenChain] = {}
    tokens: dict[str, list[int]] = {}
    adapters: dict[str, tuple[str, int]] = {}  # name and first token
    holds: dict[int, object] = {}
    allocator.on_block_moved(lambda block, target: holds.update({target: holds.get(block)}))

    def content(name: str, text: list[int], place: int) -> object:
        adapter, begin = adapters[name]
        upto = text[: (place + 1) * block_size]
        return [(token, adapter if at >= begin else None) for at, token in enumerate(upto)]

    def written(name: str, first: int) -> None:
        for place in range(first // block_size, len(tokens[name]) // block_size):
            block = block_manager.table(name)[place]
            assert block_manager.num_users(block) == 1, "a shared block was written"
            holds[block] = content(name, tokens[name], place)

    for action, number, text in actions:
        name, adapter = f"r{number}", f"a{number % 2}"
        if action == "start" and name not in chains:
            adapters[name] = adapter, len(text) // 2 * (number % 3)
            chain = block_manager.chain(make_request(*text, adapter=adapter, begin=adapters[name][1]))
            assert chain is not None
            free = block_manager.num_free_blocks
            found = block_manager.reuse(name, chain, 0, len(text))
            assert found < len(text) and found % block_size == 0
            for place, block in enumerate(block_manager.table(name)):
                assert holds[block] == content(name, text, place), "wrong content found"
            fits = block_manager.missing(name, len(text)) == 0
            assert block_manager.grow(name, len(text)) == fits
            if fits:
                chains[name], tokens[name] = chain, list(text)
                written(name, found)
                block_manager.register_full_blocks(name, chain, found, len(text))
            else:
                block_manager.free(name)
                assert block_manager.num_free_blocks == free
        elif action == "answer" and name in chains:
            if block_manager.grow(name, len(tokens[name]) + 1):
                tokens[name].append(text[0])
                chains[name].append(text[0])
                assert block_manager.writable(name, len(tokens[name]) - 1)
                written(name, len(tokens[name]) - 1)
                block_manager.register_full_blocks(name, chains[name], len(tokens[name]) - 1, len(tokens[name]))
        elif action == "end" and name in chains:
            block_manager.free(name)
            del chains[name], tokens[name]
        elif action == "load":
            adapter_cache.allocate(name, len(text))
        elif action == "evict" and name in adapter_cache.resident:
            adapter_cache.free(name)
        elif action == "forget":
            block_manager.forget(adapter)
            assert not prefix.blocks_of(adapter)
        for other, table in ((other, block_manager.table(other)) for other in chains):
            for place, block in enumerate(table[: len(tokens[other]) // block_size]):
                assert holds[block] == content(other, tokens[other], place)
        block_manager.check_integrity()
        allocator.check_integrity()
        adapter_cache.check_integrity()
        used = set(itertools.chain.from_iterable(block_manager.table(other) for other in chains))
        assert len(used) + block_manager.num_free_blocks + allocator.page_kinds.count(1) == block_manager.total_blocks
