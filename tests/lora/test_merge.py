"""Switching with a shadow copy is exact: W0 is never written, so weights never drift."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import atmm
from tests.families import build_model
from tests.lora.made_adapters import factors_of
from tests.oracle import ADAPTERS, Oracle
from vlora.lora import AdapterRegistry, HostAdapter
from vlora.lora.adapted_linear import AdaptedLinear
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.merge import merge_runs
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

    def __init__(self, model: Any, folders: Mapping[str, str], *, join: bool = False) -> None:
        self.model = model
        hf_model = HFModel(model)
        self.linears = hf_model.language_linears
        self.slabs = WeightSlabs(self.linears, join=join)
        arena = Arena(64 * 2**20 // PAGE_BYTES, CPU)
        adapter_cache = AdapterCache(PageAllocator(arena.num_pages, 1), arena.num_pages)
        transfer = make_transfer(CPU, Inline())
        self.pool = AdapterPool(arena, adapter_cache, transfer, self.linears, hf_model.vision_linears, self.slabs.order)
        self.switcher = ShadowSwitcher(self.slabs, self.pool, complete=join)
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

    monkeypatch.setattr(mergeable.slabs, "allocate", refuse)
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
        on_base = linear.weight.data_ptr() == mergeable.slabs.entry(name).data_ptr()
        assert on_base == (not name.endswith(("q_proj", "v_proj"))), name
    with torch.no_grad():
        mergeable.switcher.switch(None)


def test_layers_of_one_shape_and_rank_merge_in_one_call(mergeable: Mergeable) -> None:
    runs = merge_runs(mergeable.slabs, mergeable.pool.shapes(mergeable.key("wide8")))
    assert len(runs) == len(mergeable.slabs.base)
    patterned = merge_runs(mergeable.slabs, mergeable.pool.shapes(mergeable.key("patterned16")))
    assert sum(run.last - run.first for run in patterned) == len(mergeable.linears)
    assert len(patterned) > len(runs)


def content(mergeable: Mergeable) -> dict[str, torch.Tensor]:
    return {name: linear.weight.detach().clone() for name, linear in mergeable.linears.items()}


def addresses(mergeable: Mergeable) -> dict[str, int]:
    return {name: linear.weight.data_ptr() for name, linear in mergeable.linears.items()}


def test_a_complete_shadow_has_the_same_addresses_for_every_adapter(mergeable: Mergeable) -> None:
    plain = mergeable.switcher
    complete = ShadowSwitcher(mergeable.slabs, mergeable.pool, complete=True)
    draw = random.Random(3)
    moves = [*ADAPTERS, *ADAPTERS[::-1], *draw.choices([*ADAPTERS, None], k=40)]
    merged_at: set[tuple[int, ...]] = set()
    with torch.no_grad():
        plain.switch(None)
        on_base, base = addresses(mergeable), content(mergeable)
        for name in moves:
            key = name and mergeable.key(name)
            plain.switch(key)
            wanted = content(mergeable)
            plain.switch(None)
            complete.switch(key)
            found, at = content(mergeable), addresses(mergeable)
            complete.switch(None)
            assert all(torch.equal(found[layer], wanted[layer]) for layer in wanted), name
            if key is None:
                assert at == on_base
            else:
                merged_at.add(tuple(at.values()))
                assert not set(at.values()).intersection(on_base.values())
        assert addresses(mergeable) == on_base
        assert all(torch.equal(weight, base[layer]) for layer, weight in content(mergeable).items())
    assert len(merged_at) == 1, "a captured graph holds for every adapter"


@pytest.fixture(scope="module")
def joined_and_separate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mergeable, Mergeable]:
    folders = Oracle("qwen2_vl", build_model("qwen2_vl")).save(Path(tmp_path_factory.mktemp("adapters")))
    joined, separate = (Mergeable(build_model("qwen2_vl"), folders, join=join) for join in (True, False))
    return joined, separate


def test_joined_layers_have_the_weights_of_separate_ones(joined_and_separate: tuple[Mergeable, Mergeable]) -> None:
    """On a GPU one product computes layers with the same input, from adjacent weights at two fixed addresses."""
    joined, separate = joined_and_separate
    layers: dict[int, list[AdaptedLinear]] = {}
    for linear in joined.linears.values():
        if linear.joined is not None:
            layers.setdefault(id(linear.joined), []).append(linear)
    assert sorted(map(len, layers.values())) == 4 * [2] + 4 * [3], "gate, up and q, k, v of four layers"
    assert separate.model.state_dict().keys() == joined.model.state_dict().keys()
    draw = random.Random(3)
    base_at: set[int] = set()
    merged_at: set[int] = set()
    with torch.no_grad():
        for name in (None, *ADAPTERS, *draw.choices([*ADAPTERS, None], k=20)):
            for own in joined_and_separate:
                own.switcher.switch(name and own.key(name))
            wanted = content(separate)
            assert all(torch.equal(weight, wanted[layer]) for layer, weight in content(joined).items()), name
            for members in layers.values():
                together = members[0].joined
                assert together is not None
                rows = together.weight.split([member.out_features for member in members])
                assert [part.data_ptr() for part in rows] == [member.weight.data_ptr() for member in members]
                (merged_at if name else base_at).add(together.weight.data_ptr())
    assert len(base_at) == len(merged_at) == len(layers) and base_at.isdisjoint(merged_at)


def test_joined_layers_have_the_biases_of_separate_ones(joined_and_separate: tuple[Mergeable, Mergeable]) -> None:
    joined, separate = (own.linears for own in joined_and_separate)
    for name, linear in joined.items():
        if linear.bias is not None and linear.joined is not None and linear.joined.bias is not None:
            assert torch.equal(linear.bias, separate[name].bias)
            first = linear.joined.bias.data_ptr()
            assert first <= linear.bias.data_ptr() < first + linear.joined.bias.nbytes, "one copy"
        assert (linear.bias is None) == (linear.joined is None or linear.joined.bias is None), name


def test_joined_layers_are_never_switched_apart(joined_and_separate: tuple[Mergeable, Mergeable]) -> None:
    joined, _ = joined_and_separate
    with pytest.raises(AssertionError, match="one place"):
        ShadowSwitcher(joined.slabs, joined.pool)


def test_layers_without_a_delta_are_restored_after_a_failed_merge(
    mergeable: Mergeable, monkeypatch: pytest.MonkeyPatch
) -> None:
    switcher = ShadowSwitcher(mergeable.slabs, mergeable.pool, complete=True)
    with torch.no_grad():
        base = content(mergeable)
        with monkeypatch.context() as patch:
            calls = iter(range(10))

            def failing(out: torch.Tensor, *_: object) -> None:
                out.fill_(torch.nan)
                if next(calls) == 2:
                    raise RuntimeError("out of memory")

            patch.setattr(atmm, "merge", failing)
            with pytest.raises(RuntimeError, match="out of memory"):
                switcher.switch(mergeable.key("wide8"))
        assert all(torch.equal(weight, base[layer]) for layer, weight in content(mergeable).items())
        switcher.switch(mergeable.key("narrow4"))
        for layer, weight in content(mergeable).items():
            assert not weight.isnan().any(), layer
            assert torch.equal(weight, base[layer]) == (layer not in mergeable.adapters["narrow4"].shapes), layer
        switcher.switch(None)


def test_a_complete_shadow_copies_only_what_changes(mergeable: Mergeable, monkeypatch: pytest.MonkeyPatch) -> None:
    switcher = ShadowSwitcher(mergeable.slabs, mergeable.pool, complete=True)
    copied: list[int] = []
    copy = torch.Tensor.copy_

    def recorded_copy(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        copied.append(len(own))
        return copy(own, other)

    monkeypatch.setattr(torch.Tensor, "copy_", recorded_copy)
    monkeypatch.setattr(atmm, "merge", lambda *_: None)
    with torch.no_grad():
        switcher.switch(mergeable.key("narrow4"))
        assert copied == [], "the shadow starts with W0"
        switcher.switch(mergeable.key("wide8"))
        assert copied == []
        switcher.switch(mergeable.key("narrow4"))
        untargeted = mergeable.adapters["wide8"].shapes.keys() - mergeable.adapters["narrow4"].shapes.keys()
        assert sum(copied) == len(untargeted.intersection(mergeable.linears))
        assert len(copied) < len(untargeted) / 2, "neighbouring layers in one copy"
        switcher.switch(None)
        switcher.switch(mergeable.key("narrow4"))
        assert sum(copied) == len(untargeted.intersection(mergeable.linears))
        switcher.switch(None)
