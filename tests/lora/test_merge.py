"""Switching with a shadow copy is exact: W0 is never written, so weights never drift."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.families import build_model
from tests.lora.made_adapters import factors_of
from tests.oracle import ADAPTERS, Oracle
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.lora import HostAdapter
from vlora.lora.merge import merge_fidelity, merge_runs
from vlora.lora.merge_shadow import ShadowSwitcher
from vlora.memory.host_to_device import Inline

pytestmark = pytest.mark.slow


def content(local: LocalEngine, name: str) -> HostAdapter:
    registry = local.engine._registry
    return registry.read(registry.get(name).key)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    model = build_model("qwen2_vl", request.param)
    folders = Oracle("qwen2_vl", model.float() if request.param is torch.float32 else build_model("qwen2_vl")).save(
        Path(tmp_path_factory.mktemp("adapters"))
    )
    local = LocalEngine(
        EngineConfig(model="qwen2_vl", arena_bytes=64 * 2**20), model=model.to(request.param), executor=Inline()
    )
    for name, folder in folders.items():
        local.engine.load_adapter(name, folder)
        assert local.engine._bank.bring(content(local, name))
    return local


def test_weights_are_bit_identical_after_a_thousand_switches(engine: LocalEngine) -> None:
    inner = engine.engine
    model = inner._seam.model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    keys = [inner._registry.get(name).key for name in ADAPTERS]
    draw = random.Random(7)
    with torch.no_grad():
        for _ in range(1000):
            inner._switcher.switch(draw.choice([*keys, None]))
        inner._switcher.switch(None)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_the_first_merge_costs_what_every_merge_does(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for merged weights is allocated at startup, and a merge allocates none."""
    inner = engine.engine
    switcher = ShadowSwitcher(inner._slabs, inner._bank)

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a merge allocates memory for weights")

    monkeypatch.setattr("vlora.lora.merge_shadow.empty", refuse)
    with torch.no_grad():
        switcher.switch(inner._registry.get(ADAPTERS[0]).key)
        switcher.switch(None)


@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_weights_are_base_plus_delta(engine: LocalEngine, name: str) -> None:
    inner = engine.engine
    adapter = content(engine, name)
    linears = inner._seam.language_linears
    with torch.no_grad():
        inner._switcher.switch(None)
        base = {site: linear.weight.detach().clone() for site, linear in linears.items()}
        inner._switcher.switch(adapter.key)
        for site, linear in linears.items():
            want = base[site].double()
            if site in adapter.shapes:
                pair = factors_of(adapter)[site]
                want = want + pair.bt.double().t() @ pair.a.double()
            epsilon = torch.finfo(linear.weight.dtype).eps
            # One rounding of the sum, and for float32 the rounding of a product of up to 64 terms.
            assert torch.allclose(linear.weight.double(), want, rtol=epsilon, atol=8 * epsilon), site
        inner._switcher.switch(None)


def test_layers_an_adapter_does_not_touch_stay_on_the_base(engine: LocalEngine) -> None:
    inner = engine.engine
    with torch.no_grad():
        inner._switcher.switch(inner._registry.get("narrow4").key)
    for name, linear in inner._seam.language_linears.items():
        shape, index = inner._slabs.slots[name]
        on_base = linear.weight.data_ptr() == inner._slabs.base[shape][index].data_ptr()
        assert on_base == (not name.endswith(("q_proj", "v_proj"))), name
    with torch.no_grad():
        inner._switcher.switch(None)


def test_one_call_per_shape_where_ranks_agree(engine: LocalEngine) -> None:
    inner = engine.engine
    runs = merge_runs(inner._slabs, inner._bank.shapes(inner._registry.get("wide8").key))
    assert len(runs) == len(inner._slabs.base)
    patterned = merge_runs(inner._slabs, inner._bank.shapes(inner._registry.get("patterned16").key))
    assert sum(run.last - run.first for run in patterned) == len(inner._seam.language_linears)
    assert len(patterned) > len(runs)


def test_a_smaller_delta_loses_more_when_merged_into_bfloat16() -> None:
    inner = LocalEngine(
        EngineConfig(model="qwen2_vl", arena_bytes=2**24), model=build_model("qwen2_vl", torch.bfloat16)
    ).engine
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in (1.0, 0.1, 0.01, 0.001):
        from vlora.lora import HostFactors

        factors = {}
        for name, linear in inner._seam.language_linears.items():
            a = torch.randn(8, linear.in_features, generator=generator)
            bt = torch.randn(8, linear.out_features, generator=generator)
            bt *= size * float(linear.weight.detach().float().std()) / 8**0.5
            factors[name] = HostFactors(a.bfloat16(), bt.bfloat16())
        found.append(merge_fidelity(inner._slabs, inner._switcher, factors))
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.99 and found[-1] < 0.5
