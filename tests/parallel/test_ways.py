"""An adapter's sharding is decided once, and logged: as configured, or as predicted to be faster."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.parallel.test_choice import layers
from vlora.config import EngineConfig
from vlora.engine.ways import Ways
from vlora.lora import SiteShape
from vlora.parallel.choice import Costs, choose

FAST, SLOW = (Costs(6, gather_s=call_s, reduce_s=call_s, byte_s=0.0, factor_byte_s=1e-9) for call_s in (1e-7, 1e-3))


def ways(costs: Costs, *sharding: str) -> tuple[Ways, Any]:
    """And the header of an adapter of rank 8 on all layers of three, on two ranks."""
    found = [(f"site {number}", layer) for number, layer in enumerate(layers(2, 8))]
    sites = {name: SiteShape(layer.shard.d_in, layer.shard.d_out, False, layer.shard) for name, layer in found}
    targets = [
        SimpleNamespace(site=name, rank=8, blocks=None, vision=False, cut=shape.cut(8, None, "replicated"))
        for name, shape in sites.items()
    ]
    config = EngineConfig(model="any", tensor_parallel=2, sharding=sharding)
    groups = {name: layer.group for name, layer in found}
    return Ways(config, sites, groups, torch.bfloat16, costs), SimpleNamespace(targets=targets)


@pytest.mark.parametrize(("costs", "way"), [(FAST, "slora"), (SLOW, "replicated")])
def test_auto_says_what_it_took_and_what_it_expected(costs: Costs, way: str, caplog: pytest.LogCaptureFixture) -> None:
    decide, header = ways(costs)
    with caplog.at_level(logging.INFO, "vlora.engine.ways"):
        assert decide("mine", header) == way
    wanted = choose(layers(2, 8), 2, costs)
    assert [record.getMessage() for record in caplog.records] == [
        f"adapter 'mine': {way} (predicted for 6 tokens a step: replicated {1e3 * wanted.replicated_s:.3f} ms, "
        f"slora {1e3 * wanted.slora_s:.3f} ms)"
    ]


@pytest.mark.parametrize("kind", ["slora", "replicated"])
def test_what_a_user_wants_is_taken_without_a_word(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    decide, header = ways(FAST if kind == "replicated" else SLOW, f"mine={kind}")
    with caplog.at_level(logging.INFO, "vlora.engine.ways"):
        assert decide("mine", header) == kind
    assert not caplog.records
