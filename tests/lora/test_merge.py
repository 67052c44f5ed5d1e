"""Switching with a shadow copy is exact: W0 is never written, so weights never drift."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import build_model
from tests.lora.made_adapters import factors_of
from tests.oracle import ADAPTERS, Oracle
from vlora.lora import AdapterRegistry, HostAdapter, HostFactors
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.merge import merge_fidelity, merge_runs
from vlora.lora.merge_shadow import ShadowSwitcher
from vlora.lora.weight_slabs import WeightSlabs
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.arena import PAGE_BYTES, Arena
from vlora.memory.host_to_device import Inline, make_transfer
from vlora.memory.page_allocator import PageAllocator
from vlora.models.hf_model import HFModel

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


class Mergeable:
    """A model with its weights in slabs, loaded adapters by name, and a shadow switcher."""

    def __init__(self, model: Any, folders: Mapping[str, str]) -> None:
        self.model = model
        hf_model = HFModel(model)
        self.linears = hf_model.language_linears
        self.slabs = WeightSlabs(self.linears)
        arena = Arena(64 * 2**20 // PAGE_BYTES, CPU)
        adapter_cache = AdapterCache(PageAllocator(arena.num_pages, 1), arena.num_pages)
        transfer = make_transfer(CPU, Inline())
        self.pool = AdapterPool(arena, adapter_cache, transfer, self.linears, hf_model.vision_linears, self.slabs.order)
        self.switcher = ShadowSwitcher(self.slabs, self.pool)
        registry = AdapterRegistry(self.pool.sites, hf_model.dtype, hf_model.hidden_size, executor=Inline())
        self.adapters: dict[str, HostAdapter] = {}
        for name, folder in folders.items():
            adapter = registry.read_folder(name, folder).adapter
            assert adapter is not None and self.pool.load(adapter)
            self.adapters[name] = adapter

    def key(self, name: str) -> str:
        return self.adapters[name].key


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def mergeable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mergeable:
    model = build_model("qwen2_vl", request.param)
    folders = Oracle("qwen2_vl", model.float() if request.param is torch.float32 else build_model("qwen2_vl")).save(
        Path(tmp_path_factory.mktemp("adapters"))
    )
    return Mergeable(model.to(request.param), folders)


def test_weights_are_bit_identical_after_a_thousand_switches(mergeable: Mergeable) -> None:
    before = {name: parameter.detach().clone() for name, parameter in mergeable.model.named_parameters()}
    keys = [mergeable.key(name) for name in ADAPTERS]
    draw = random.Random(7)
    with torch.no_grad():
        for _ in range(1000):
            mergeable.switcher.switch(draw.choice([*keys, None]))
        mergeable.switcher.switch(None)
    for name, parameter in mergeable.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_a_merge_allocates_no_memory(mergeable: Mergeable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for merged weights is allocated at startup, so the first merge costs the same as later ones."""
    switcher = ShadowSwitcher(mergeable.slabs, mergeable.pool)

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a merge allocates memory for weights")

    monkeypatch.setattr("vlora.lora.merge_shadow.empty", refuse)
    with torch.no_grad():
        switcher.switch(mergeable.key(ADAPTERS[0]))
        switcher.switch(None)


@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_weights_are_base_plus_delta(mergeable: Mergeable, name: str) -> None:
    adapter, linears = mergeable.adapters[name], mergeable.linears
    with torch.no_grad():
        mergeable.switcher.switch(None)
        base = {site: linear.weight.detach().clone() for site, linear in linears.items()}
        mergeable.switcher.switch(adapter.key)
        for site, linear in linears.items():
            want = base[site].double()
            if site in adapter.shapes:
                pair = factors_of(adapter)[site]
                want = want + pair.bt.double().t() @ pair.a.double()
            epsilon = torch.finfo(linear.weight.dtype).eps
            # One rounding of the sum, and for float32 the rounding of a product of up to 64 terms.
            assert torch.allclose(linear.weight.double(), want, rtol=epsilon, atol=8 * epsilon), site
        mergeable.switcher.switch(None)


def test_layers_without_a_delta_keep_the_base_weights(mergeable: Mergeable) -> None:
    with torch.no_grad():
        mergeable.switcher.switch(mergeable.key("narrow4"))
    for name, linear in mergeable.linears.items():
        shape, index = mergeable.slabs.slots[name]
        on_base = linear.weight.data_ptr() == mergeable.slabs.base[shape][index].data_ptr()
        assert on_base == (not name.endswith(("q_proj", "v_proj"))), name
    with torch.no_grad():
        mergeable.switcher.switch(None)


def test_layers_of_one_shape_and_rank_merge_in_one_call(mergeable: Mergeable) -> None:
    runs = merge_runs(mergeable.slabs, mergeable.pool.shapes(mergeable.key("wide8")))
    assert len(runs) == len(mergeable.slabs.base)
    patterned = merge_runs(mergeable.slabs, mergeable.pool.shapes(mergeable.key("patterned16")))
    assert sum(run.last - run.first for run in patterned) == len(mergeable.linears)
    assert len(patterned) > len(runs)


def test_a_smaller_delta_loses_more_when_merged_into_bfloat16() -> None:
    mergeable = Mergeable(build_model("qwen2_vl", torch.bfloat16), {})
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in (1.0, 0.1, 0.01, 0.001):
        factors = {}
        for name, linear in mergeable.linears.items():
            a = torch.randn(8, linear.in_features, generator=generator)
            bt = torch.randn(8, linear.out_features, generator=generator)
            bt *= size * float(linear.weight.detach().float().std()) / 8**0.5
            factors[name] = HostFactors(a.bfloat16(), bt.bfloat16())
        found.append(merge_fidelity(mergeable.slabs, mergeable.switcher, factors))
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.99 and found[-1] < 0.5
