"""Lanes of a scope: consecutive steps with equal lanes share one plan, and other steps never use it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from atmm import Factors, Lane, SiteGroup, processor
from atmm.matmul import linear, linears
from vlora.lora import adapted_linear
from vlora.lora.adapted_linear import AdaptedLinear, LaneScope, Siblings, adapt
from vlora.lora.weight_slabs import WeightSlabs
from vlora.parallel.adapter_sharding import FactorShape


def test_steps_with_equal_lanes_share_a_plan_that_reads_the_current_factors() -> None:
    scope = LaneScope()
    layer = adapt(nn.Linear(6, 4, bias=False), "layer", scope)
    x, plans = torch.randn(3, 6), []
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        plain = layer(x)
        for lanes, fresh in (
            ([Lane("a", 0, 2)], True),
            ([Lane("a", 0, 2)], False),
            ([Lane("a", 0, 2)], True),  # the same key with other weights
            ([Lane("a", 1, 3)], False),
            ([Lane("a", 1, 3, -1.0)], False),
            ([], False),
            ([Lane("a", 1, 3, -1.0)], False),
        ):
            if fresh:
                layer.site.factors["a"] = Factors(
                    torch.randn(2, 6, generator=generator), torch.randn(2, 4, generator=generator)
                )
            expected = plain.clone()
            for key, start, stop, sign in lanes:
                a, bt = layer.site.factors[key]
                expected[start:stop] += sign * (x[start:stop] @ a.T @ bt)
            with scope.lanes(3, lanes):
                plans.append(scope.plan_for(3))
                torch.testing.assert_close(layer(x), expected)
            assert scope.plan_for(3) is None
    assert plans[0] is plans[1] is plans[2] and plans[3] is not plans[2]
    assert plans[5] is None and plans[6] is plans[4]


def test_scaled_lanes_follow_the_current_plan() -> None:
    scope = LaneScope()
    for stop in (4, 8):
        with scope.lanes(8, [Lane("a", 0, stop)]):
            (lane,) = scope.plan_for(2).lanes  # type: ignore[union-attr]
            assert (lane.start, lane.stop) == (0, stop // 4)


def siblings(scope: LaneScope, *, bias: bool) -> list[AdaptedLinear]:
    """Three layers with six inputs, and adapter a of rank 2 on the first and the last.

    The type is bfloat16, so that a CPU with matrix tiles joins them.
    """
    generator = torch.Generator().manual_seed(0)
    layers = [adapt(nn.Linear(6, d_out, bias=bias, dtype=torch.bfloat16), str(d_out), scope) for d_out in (4, 2, 5)]
    for layer in (layers[0], layers[2]):
        layer.site.factors["a"] = Factors(
            *(torch.randn(2, d, generator=generator).bfloat16() for d in (6, layer.out_features))
        )
    SiteGroup([layer.site for layer in layers])
    return layers


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with matrix tiles."""
    monkeypatch.setattr(processor, "flags", lambda: frozenset(["amx_bf16"]))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("bias", (False, True))
def test_siblings_give_the_outputs_of_single_layers(bias: bool) -> None:
    scope = LaneScope()
    layers = siblings(scope, bias=bias)
    inputs = [torch.randn(2, 3, 6).bfloat16(), torch.randn(2, 3, 6).bfloat16()]
    orders = ([0, 1, 2], [2, 0, 1], [0], [1, 1, 2], [0, 1, 2])
    with torch.inference_mode():
        for lanes in ([Lane("a", 1, 4)], []):
            expected = []
            for x in inputs:
                with scope.lanes(6, lanes):
                    expected.append([layer(x) for layer in layers])
            Siblings(layers)
            for turn, order in enumerate(orders):
                with scope.lanes(6, lanes):
                    for index in order:
                        # A new view each time, as a model's code may create.
                        found = layers[index](inputs[turn % 2].view(2, 3, 6))
                        torch.testing.assert_close(found, expected[turn % 2][index])
            for layer in layers:
                layer.siblings = None


@pytest.mark.parametrize("bias", ((False,) * 3, (True,) * 3, (True, False, True)), ids=("none", "all", "some"))
def test_joined_layers_need_one_product(bias: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapter a targets q and v; adapter b is block-diagonal."""
    scope = LaneScope()
    torch.manual_seed(0)
    leaves = ("q_proj", "k_proj", "v_proj")
    layers = [
        adapt(nn.Linear(6, d_out, bias=own).requires_grad_(False), f"layers.0.{leaf}", scope)
        for leaf, d_out, own in zip(leaves, (4, 2, 6), bias, strict=True)
    ]
    for layer in (layers[0], layers[2]):
        layer.attach(
            "a", FactorShape(2, 6, layer.out_features), (torch.randn(2, 6), torch.randn(2, layer.out_features))
        )
        blocks = FactorShape(2, 6, layer.out_features, "blocks_b", 2)
        layer.attach("b", blocks, (torch.randn(2, 6), torch.randn(1, layer.out_features)))
    SiteGroup([layer.site for layer in layers])
    x = torch.randn(2, 3, 6)
    cases: tuple[list[Lane], ...] = ([], [Lane("a", 1, 4), Lane("b", 4, 6, -1.0)])
    products: list[int] = []

    def counted_linear(*given: Any) -> torch.Tensor:
        products.append(1)
        return linear(*given)

    monkeypatch.setattr(adapted_linear, "linear", counted_linear)
    with torch.inference_mode():
        expected = []
        for lanes in cases:
            with scope.lanes(6, lanes):
                expected.append([layer(x) for layer in layers])
        WeightSlabs({layer.site.name: layer for layer in layers}, join=True)
        Siblings(layers)
        for lanes, outputs in zip(cases, expected, strict=True):
            products.clear()
            with scope.lanes(6, lanes):
                for layer, right in zip(layers, outputs, strict=True):
                    torch.testing.assert_close(layer(x), right)
            assert len(products) == 1


@pytest.mark.usefixtures("tiles")
def test_siblings_compute_once_and_release_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = LaneScope()
    layers = siblings(scope, bias=True)
    Siblings(layers)
    calls = []

    def counted_linears(*given: Any) -> torch.Tensor:
        calls.append(1)
        return linears(*given)

    monkeypatch.setattr(adapted_linear, "linears", counted_linears)
    with torch.inference_mode(), scope.lanes(3, [Lane("a", 0, 3)]):
        x = torch.randn(3, 6).bfloat16()
        for layer in layers:
            layer(x)
        assert len(calls) == 1
        held = weakref.ref(x)
        del x
        assert held() is None, "the input is released after the last layer"
        x = torch.randn(3, 6).bfloat16()
        layers[0](x)
        other = x + 1  # outputs kept for the old input must not be used for the new one
        torch.testing.assert_close(layers[1](other), nn.functional.linear(other, layers[1].weight, layers[1].bias))
    assert len(calls) == 3
