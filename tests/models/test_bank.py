"""Adapters come and go in any order, with copies under way at any time: books add up and no byte is written over."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.engine.on_demand import OnDemand
from tests.models import made_adapters
from vlora.adapters import HostAdapter, HostFactors
from vlora.memory.arena import Arena, pages_for
from vlora.memory.books import ArenaBooks
from vlora.memory.residency import Residency
from vlora.memory.transfer import HostTransfer
from vlora.models.adapted import AdaptedLinear, LaneScope, adapt
from vlora.models.bank import AdapterBank

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


def test_the_sizes_are_what_the_story_needs() -> None:
    assert [pages_for(adapter.run.nbytes) for adapter in ADAPTERS.values()] == [1, 1, 2, 3, 4]
    for adapter in ADAPTERS.values():
        used = sum(math.prod(tensor.shape) * 4 for pair in adapter.factors.values() for tensor in pair)
        assert used <= adapter.run.nbytes < used + 4 * 256


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["bring", "bring", "copy", "copy", "collect", "drop", "fail", "take", "return"]),
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
    blocks: dict[int, int] = {}  # what it is filled with, by number
    books.on_renamed(lambda block, target: blocks.update({target: blocks.pop(block)}))
    for filling, (action, name) in enumerate(actions, 1):
        adapter = ADAPTERS[name]
        before, arriving = bank.resident, bank.arriving
        if action == "bring":
            if bank.bring(adapter):
                assert adapter.key in bank.resident | bank.arriving
                assert arriving <= bank.arriving, "what is on its way stays"
            else:
                assert (bank.resident, bank.arriving) == (before, arriving), "nothing leaves in vain"
        elif action == "copy":
            background.run()
            assert bank.resident == before, "a step may use it only once it was collected"
        elif action == "fail" and background.waiting:
            future, _ = background.waiting.popleft()
            if not future.cancelled():
                future.set_exception(RuntimeError("the bus is down"))
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
        residency.check_integrity()
        books.check_integrity()
        assert residency.resident == bank.resident | bank.arriving
        for key in bank.resident:
            for site, (a, bt) in ADAPTERS[key[0]].factors.items():
                assert torch.equal(bank.factors(key, site).a, a) and torch.equal(bank.factors(key, site).bt, bt)
                assert layers[site].site.factors[key].a is bank.factors(key, site).a
        assert all(layer.site.factors.keys() == bank.resident for layer in layers.values())
        for block, filled in blocks.items():
            assert (arena.buffer(2 * block, 2) == filled).all(), "a copy ran into a KV block"
    for name in RANKS:
        bank.drop(ADAPTERS[name].key)
    assert residency.num_pages == 0 and not bank.pending
