"""Adapters load and evict in any order, with concurrent copies: page accounting is right, no byte is overwritten."""

from __future__ import annotations

import math
from collections.abc import Set
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.engine.on_demand import OnDemand
from tests.lora import made_adapters
from tests.lora.made_adapters import factors_of
from vlora.lora import HostAdapter, HostFactors
from vlora.lora.adapted_linear import AdaptedLinear, LaneScope, adapt
from vlora.lora.adapter_pool import AdapterBank
from vlora.memory.adapter_cache import Appointed, Residency
from vlora.memory.arena import Arena, pages_for
from vlora.memory.books import ArenaBooks, Run
from vlora.memory.host_to_device import HostTransfer, Inline

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


def test_a_packed_copy_is_not_given_up_for_an_adapter_that_finds_no_room_anyway() -> None:
    arena = Arena(NUM_PAGES, torch.device("cpu"))
    residency = Residency(ArenaBooks(NUM_PAGES, 2, copy=arena.copy), MAX_PAGES)
    layers = linears()
    bank = AdapterBank(arena, residency, HostTransfer(Inline()), layers, {}, tuple(layers))
    for name in "abcd":
        assert bank.bring(ADAPTERS[name])
        residency.pin(ADAPTERS[name].key)
    for _ in range(3):
        bank.pack_for(("a@1", "b@1"))
    assert check_packed(layers, bank.resident) and residency.num_pages == 9
    assert not bank.bring(ADAPTERS["e"]), (
        "freeing the packed copy's two pages would give three, but the adapter needs four"
    )
    assert check_packed(layers, bank.resident)


class Another:
    """Another rank's bank, which gets every order at once instead of with the next step."""

    def __init__(self, layers: dict[str, AdaptedLinear]) -> None:
        self.appointed = Appointed()
        self.bank = AdapterBank(
            Arena(NUM_PAGES, torch.device("cpu")), self.appointed, HostTransfer(Inline()), layers, {}, tuple(layers)
        )

    def bring(self, key: str, run: Run) -> Future[None]:
        self.appointed.appoint(key, run)
        self.bank.bring(ADAPTERS[key[0]])
        brought: Future[None] = Future()
        brought.set_result(None)
        return brought

    def move(self, key: str, run: Run) -> None:
        raise AssertionError("unexpected move")

    def drop(self, key: str) -> None:
        self.bank.drop(key)

    def pack(self, keys: tuple[str, ...], run: Run) -> None:
        self.bank.pack(keys, run)

    def unpack(self) -> None:
        self.bank.unpack()


def test_other_ranks_pack_what_rank_0_packs() -> None:
    arena = Arena(NUM_PAGES, torch.device("cpu"))
    residency = Residency(ArenaBooks(NUM_PAGES, 2, copy=arena.copy), MAX_PAGES)
    layers, layers_there = linears(), linears()
    there = Another(layers_there)
    bank = AdapterBank(arena, residency, HostTransfer(Inline()), layers, {}, tuple(layers), there)
    for name in "abcd":
        assert bank.bring(ADAPTERS[name])
    for _ in range(3):
        assert not check_packed(layers_there, there.bank.resident)
        bank.pack_for(("a@1", "b@1"))
    assert check_packed(layers, bank.resident) and check_packed(layers_there, there.bank.resident)
    for _ in range(3):
        bank.pack_for(("c@1", "a@1"))
    assert check_packed(layers_there, there.bank.resident)
    (group, _) = (layer.site.group for layer in layers_there.values())
    assert group is not None and group.packed is not None and group.packed.layout.keys == {"a@1", "c@1"}
    bank.drop("c@1")
    assert not check_packed(layers, bank.resident) and not check_packed(layers_there, there.bank.resident)
    assert there.bank.resident == bank.resident == {"a@1", "b@1", "d@1"}


def test_the_sizes_are_what_the_story_needs() -> None:
    assert [pages_for(adapter.run.nbytes) for adapter in ADAPTERS.values()] == [1, 1, 2, 3, 4]
    for adapter in ADAPTERS.values():
        used = sum(math.prod(tensor.shape) * 4 for pair in factors_of(adapter).values() for tensor in pair)
        assert used <= adapter.run.nbytes < used + 4 * 256


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["bring", "bring", "copy", "copy", "collect", "drop", "fail", "take", "return", "pack"]),
            st.sampled_from(sorted(RANKS)),
        ),
        max_size=60,
    )
)
def test_any_order_of_loads_keeps_books_and_bytes(actions: list[tuple[str, str]]) -> None:
    background = OnDemand()
    arena = Arena(NUM_PAGES, torch.device("cpu"))
    books = ArenaBooks(NUM_PAGES, 2, copy=arena.copy)
    residency = Residency(books, MAX_PAGES)
    layers = linears()
    bank = AdapterBank(arena, residency, HostTransfer(background), layers, {}, tuple(layers))
    blocks: dict[int, int] = {}  # fill value by block number
    books.on_renamed(lambda block, target: blocks.update({target: blocks.pop(block)}))
    for filling, (action, name) in enumerate(actions, 1):
        adapter = ADAPTERS[name]
        before, arriving = bank.resident, bank.arriving
        if action == "bring":
            if bank.bring(adapter):
                assert adapter.key in bank.resident | bank.arriving
                assert arriving <= bank.arriving, "loading adapters stay"
            else:
                assert (bank.resident, bank.arriving) == (before, arriving), "a refused load evicts nothing"
        elif action == "copy":
            background.run()
            assert bank.resident == before, "an adapter is usable only after it is collected"
        elif action == "fail" and background.waiting:
            future, _ = background.waiting.popleft()
            if not future.cancelled():
                future.set_exception(RuntimeError("copy failed"))
        elif action == "collect":
            failed = bank.collect()
            assert bank.arriving == arriving - bank.resident - failed.keys()
        elif action == "drop":
            bank.drop(adapter.key)
            assert adapter.key not in bank.resident | bank.arriving
        elif action == "take" and (block := books.take_block()) is not None:
            blocks[block] = filling
            arena.buffer(2 * block, 2).fill_(filling)
        elif action == "return" and blocks:
            books.return_block(blocks.popitem()[0])
        elif action == "pack":
            for _ in range(3):  # consecutive steps use these adapters together
                bank.pack_for(bank.resident)
        residency.check_integrity()
        books.check_integrity()
        assert residency.resident == bank.resident | bank.arriving
        for key in bank.resident:
            for site, (a, bt) in factors_of(ADAPTERS[key[0]]).items():
                assert torch.equal(bank.factors(key, site).a, a) and torch.equal(bank.factors(key, site).bt, bt)
                assert layers[site].site.factors[key].a is bank.factors(key, site).a
        assert all(layer.site.factors.keys() == bank.resident for layer in layers.values())
        check_packed(layers, bank.resident)
        for block, filled in blocks.items():
            assert (arena.buffer(2 * block, 2) == filled).all(), "a copy overwrote a KV block"
    for name in RANKS:
        bank.drop(ADAPTERS[name].key)
    assert residency.num_pages == 0 and not bank.pending
