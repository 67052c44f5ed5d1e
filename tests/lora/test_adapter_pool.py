"""Adapters load and evict in any order, with concurrent copies: page accounting is right, no byte is overwritten."""

from __future__ import annotations

import threading
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.example_counts import scaled
from tests.lora import made_adapters
from tests.lora.made_adapters import factors_of
from tests.queued_executor import QueuedExecutor
from vlora.lora.adapted_linear import AdaptedLinear, LaneScope, adapt
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.host_adapter import HostAdapter
from vlora.lora.layout import HostFactors
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.arena import Arena
from vlora.memory.host_to_device import HostTransfer, Inline
from vlora.memory.page_allocator import PageAllocator

NUM_PAGES, MAX_PAGES = 16, 10
RANKS = {"a": 8, "b": 20, "c": 40, "d": 64, "e": 90}  # 1 to 5 pages


def host_adapter(name: str) -> HostAdapter:
    generator = torch.Generator().manual_seed(ord(name))
    factors = {
        f"layers.{i}.q_proj": HostFactors(*(torch.randn(RANKS[name], d, generator=generator) for d in (256, 64)))
        for i in range(2)
    }
    return made_adapters.host_adapter(f"{name}@1", factors)


ADAPTERS = {name: host_adapter(name) for name in RANKS}


def linears() -> dict[str, AdaptedLinear]:
    scope = LaneScope()
    names = [f"layers.{i}.q_proj" for i in range(2)]
    return {name: adapt(nn.Linear(256, 64, bias=False), name, scope) for name in names}


def check_packed(layers: dict[str, AdaptedLinear], resident: Set[str]) -> bool:
    """Whether there is a packed copy, after checking that its content equals its adapters' factors."""
    groups = [group for layer in layers.values() if (group := layer.site.group) is not None]
    for (site, _), group in zip(layers.items(), groups, strict=True):
        if (packed := group.packed) is not None:
            keys = list(packed.layout.spans[0])
            assert keys == sorted(packed.layout.keys) and packed.layout.keys <= resident
            assert torch.equal(packed.a, torch.cat([factors_of(ADAPTERS[key[0]])[site].a for key in keys]))
    return all(group.packed is not None for group in groups)


def make_pool(layers: dict[str, AdaptedLinear], others: Any = None) -> tuple[AdapterPool, AdapterCache]:
    """A pool of ten pages that loads at once."""
    arena = Arena(NUM_PAGES, torch.device("cpu"))
    adapter_cache = AdapterCache(PageAllocator(NUM_PAGES, 2, copy=arena.copy), MAX_PAGES)
    pool = AdapterPool(arena, adapter_cache, HostTransfer(Inline()), layers, {}, tuple(layers), others)
    return pool, adapter_cache


def test_the_adapter_that_was_requested_least_recently_leaves() -> None:
    pool, _ = make_pool(linears())
    for name in "decad":  # pages 3, 4, 2 and 1; d again
        assert pool.load(ADAPTERS[name])
    assert pool.load(ADAPTERS["b"]) and pool.resident == {f"{name}@1" for name in "dcab"}
    assert [pool.loads_of(f"{name}@1") for name in "dcabe"] == [1] * 5


def test_a_packed_copy_is_kept_if_freeing_it_does_not_make_enough_room() -> None:
    """Other ranks load, pack, unpack and evict as rank 0 does."""
    others, loaded = Mock(), Future[None]()
    loaded.set_result(None)
    others.load.return_value = loaded
    pool, adapter_cache = make_pool(layers := linears(), others)
    for name in "abcd":
        assert pool.load(ADAPTERS[name])
        adapter_cache.pin(ADAPTERS[name].key)
    for _ in range(3):
        pool.pack_for(("a@1", "b@1"))
    assert check_packed(layers, pool.resident) and adapter_cache.num_pages == 9
    # Freeing the packed copy's two pages would give three, but the adapter needs four.
    assert not pool.load(ADAPTERS["e"]) and check_packed(layers, pool.resident)
    adapter_cache.unpin("a@1")
    pool.evict("a@1")
    assert not check_packed(layers, pool.resident) and adapter_cache.num_pages == 6
    orders = [name for name, *_ in others.method_calls]
    assert orders == [*["load"] * 4, "pack", "unpack", "evict"]
    assert others.pack.call_args.args[0] == ("a@1", "b@1")


@pytest.mark.parametrize("fails", [False, True])
def test_pages_are_freed_only_after_a_running_copy(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Otherwise the copy would write over the pages of their next owner."""
    events: list[str] = []
    running, freed = threading.Event(), threading.Event()
    arena = Arena(NUM_PAGES, torch.device("cpu"))
    adapter_cache = AdapterCache(PageAllocator(NUM_PAGES, 2, copy=arena.copy), MAX_PAGES)

    def free(key: str) -> None:
        events.append(f"freed {key}")
        if key == "a@1":
            freed.set()
        AdapterCache.free(adapter_cache, key)

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        running.set()
        freed.wait(0.1)  # long enough for an eviction that does not wait
        events.append("copied")
        if fails:
            raise RuntimeError("copy failed")

    monkeypatch.setattr(adapter_cache, "free", free)
    layers = linears()
    with ThreadPoolExecutor(1) as background:
        transfer = HostTransfer(background)
        monkeypatch.setattr(transfer, "start", lambda *views: background.submit(copy, *views))
        pool = AdapterPool(arena, adapter_cache, transfer, layers, {}, tuple(layers))
        assert pool.load(ADAPTERS["a"]) and pool.load(ADAPTERS["b"])
        running.wait()
        pool.evict("b@1")  # its copy is queued
        pool.evict("a@1")
        assert events == ["freed b@1", "copied", "freed a@1"]
    assert not pool.loading and adapter_cache.num_pages == 0 and not pool.collect()


@pytest.mark.slow
@settings(max_examples=scaled(200))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["load", "load", "copy", "copy", "collect", "evict", "fail", "take", "return", "pack"]),
            st.sampled_from(sorted(RANKS)),
        ),
        max_size=60,
    )
)
def test_any_order_of_loads_keeps_pages_and_factors(actions: list[tuple[str, str]]) -> None:
    background = QueuedExecutor()
    arena = Arena(NUM_PAGES, torch.device("cpu"))
    allocator = PageAllocator(NUM_PAGES, 2, copy=arena.copy)
    adapter_cache = AdapterCache(allocator, MAX_PAGES)
    layers = linears()
    pool = AdapterPool(arena, adapter_cache, HostTransfer(background), layers, {}, tuple(layers))
    blocks: dict[int, int] = {}  # fill value by block number
    allocator.on_block_moved(lambda block, target: blocks.update({target: blocks.pop(block)}))
    for filling, (action, name) in enumerate(actions, 1):
        adapter = ADAPTERS[name]
        before, arriving = pool.resident, pool.loading
        if action == "load":
            if pool.load(adapter):
                assert adapter.key in pool.resident | pool.loading
                assert arriving <= pool.loading, "loading adapters stay"
            else:
                assert (pool.resident, pool.loading) == (before, arriving), "a refused load evicts nothing"
        elif action == "copy":
            background.run()
            assert pool.resident == before, "an adapter is usable only after it is collected"
        elif action == "fail" and background.waiting:
            future, _ = background.waiting.popleft()
            if not future.cancelled():
                future.set_exception(RuntimeError("copy failed"))
        elif action == "collect":
            failed = pool.collect()
            assert pool.loading == arriving - pool.resident - failed.keys()
        elif action == "evict":
            pool.evict(adapter.key)
            assert adapter.key not in pool.resident | pool.loading
        elif action == "take" and (block := allocator.allocate_block()) is not None:
            blocks[block] = filling
            arena.buffer(2 * block, 2).fill_(filling)
        elif action == "return" and blocks:
            allocator.free_block(blocks.popitem()[0])
        elif action == "pack":
            for _ in range(3):  # consecutive steps use these adapters together
                pool.pack_for(pool.resident)
        adapter_cache.check_integrity()
        allocator.check_integrity()
        assert adapter_cache.resident == pool.resident | pool.loading
        for key in pool.resident:
            for site, (a, bt) in factors_of(ADAPTERS[key[0]]).items():
                assert torch.equal(pool.factors(key, site).a, a) and torch.equal(pool.factors(key, site).bt, bt)
                assert layers[site].site.factors[key].a is pool.factors(key, site).a
        assert all(layer.site.factors.keys() == pool.resident for layer in layers.values())
        check_packed(layers, pool.resident)
        for block, filled in blocks.items():
            assert (arena.buffer(2 * block, 2) == filled).all(), "a copy overwrote a KV block"
    for name in RANKS:
        pool.evict(ADAPTERS[name].key)
    assert adapter_cache.num_pages == 0 and not pool.pending
