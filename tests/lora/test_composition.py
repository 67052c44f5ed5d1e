"""Composing adapters: their names, and factors in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.lora.made_adapters import adapter_of_run, factors_of
from vlora.errors import BadAdapter, BadRequest
from vlora.lora import HostAdapter, HostFactors, carve
from vlora.lora.composition import compose
from vlora.lora.layout import run_bytes
from vlora.parallel.adapter_sharding import FactorShape, dense
from vlora.types import adapter_name, composed_of

SITES = ("first", "second", "third")
DENSE = {"second": FactorShape(2, 6, 4), "third": FactorShape(3, 4, 8)}
BLOCKS = {"first": FactorShape(4, 6, 8, "blocks_a", 2), "second": FactorShape(6, 6, 4, "blocks_b", 2)}


def made(shapes: Mapping[str, FactorShape], version: str, dtype: torch.dtype = torch.float32) -> HostAdapter:
    """An adapter with random factors."""
    run = torch.zeros(run_bytes(shapes, dtype), dtype=torch.uint8)
    run.view(dtype).copy_(torch.randn(run.view(dtype).shape, generator=torch.Generator().manual_seed(ord(version))))
    return adapter_of_run(f"made@{version}", version, run, shapes, dtype)


def deltas(adapter: HostAdapter) -> dict[str, torch.Tensor]:
    pairs = {site: dense(adapter.shapes[site], *pair) for site, pair in factors_of(adapter).items()}
    return {site: bt.t() @ a for site, (a, bt) in pairs.items()}


def test_the_delta_is_the_weighted_sum_in_the_order_of_layers() -> None:
    first, second, measured = made(DENSE, "1"), made(BLOCKS, "2"), []

    def measure(factors: Mapping[str, HostFactors]) -> float:
        measured.append(list(factors))
        return 0.5

    composed = compose("both@3", [(first, 0.5), (second, -2.0)], SITES, measure)
    assert composed.key == "both@3" and composed.merge_fidelity == 0.5 and measured == [list(SITES)]
    assert composed.shapes == {
        "first": FactorShape(4, 6, 8),
        "second": FactorShape(8, 6, 4),
        "third": FactorShape(3, 4, 8),
    }
    parts, found = (deltas(first), deltas(second)), deltas(composed)
    assert torch.allclose(found["first"], -2 * parts[1]["first"], atol=1e-6)
    assert torch.allclose(found["second"], 0.5 * parts[0]["second"] - 2 * parts[1]["second"], atol=1e-6)
    assert torch.allclose(found["third"], 0.5 * parts[0]["third"], atol=1e-6)


def test_factors_that_are_split_over_ranks_are_composed_unsplit() -> None:
    whole = made({"third": FactorShape(4, 4, 8)}, "1")
    (pair,) = factors_of(whole).values()
    split = made({"third": FactorShape(4, 4, 8, "gathered", 2)}, "2")
    split.merged["third"] = pair  # type: ignore[index]
    composed = compose("split@3", [(split, 1.0), (whole, 1.0)], SITES, lambda _: 1.0)
    assert composed.shapes == {"third": FactorShape(8, 4, 8)}
    assert torch.allclose(deltas(composed)["third"], 2 * deltas(whole)["third"], atol=1e-6)


def test_the_version_depends_on_weights_and_parts() -> None:
    first, second = made(DENSE, "1"), made(BLOCKS, "2")
    parts = [[(first, 1.0), (second, 1.0)], [(first, 0.5), (second, 1.0)], [(first, 1.0), (made(BLOCKS, "3"), 1.0)]]
    versions = [compose("key@1", each, SITES, lambda _: 1.0).version for each in (*parts, parts[0])]
    assert len(set(versions)) == 3 and versions[0] == versions[3]


def test_weighted_values_that_are_not_finite_are_rejected() -> None:
    large = made(DENSE, "1", torch.float16)
    for _, bt in carve(large.run, large.shapes, large.dtype).values():
        bt.mul_(1e4)
    with pytest.raises(
        BadAdapter, match=r"adapter '9\*a' has values that are not finite in torch.float16; lower its w"
    ):
        compose("9*a@4", [(large, 9.0)], SITES, lambda _: 1.0)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("a", "a"),
        ("b+a", "a+b"),
        ("0.70*b + 1*a", "a+0.7*b"),
        ("1.0*a", "a"),
        ("-2*a+3e-05*b", "-2*a+3e-05*b"),
        ({"b": 1, "a": 0.7}, "0.7*a+b"),
        ({"a": 1.0}, "a"),
        ({"a": 2}, "2*a"),
    ],
)
def test_equal_compositions_have_equal_names(given: str | Mapping[str, float], name: str) -> None:
    assert adapter_name(given) == name == adapter_name(name)
    assert adapter_name(dict(composed_of(name))) == name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "it names no adapter; write a[+]b"),
        ({"a": True}, "the weight of 'a' is of type bool; it must be a number"),
        ({"a": "0.5"}, "the weight of 'a' is of type str"),
        ({"a": float("nan"), "b": 1}, r"composition 'a\+b' is invalid: the weight of 'a' is nan"),
        ({"a": 10**5000}, "the weight of 'a' is a whole number of 16610 bits; it must be from -100 to 100"),
        ({"a+b": 1}, r"'a\+b' is no adapter's name"),
        ({5: 1.0}, "5 is no adapter's name"),
        ({str(i): 1 for i in range(9)}, "it names 9 adapters; at most 8 can be composed"),
        ("a" * 10**6 + "+", "^.{0,400}$"),
        ("0*" + "a" * 10**6, "^.{0,600}$"),
        ("+" * 10**6, "it names 1000001 adapters"),
        ("9" * 10**6 + "*a", "the weight of 'a' is inf"),
        ("9" * 10**6 + "x*a", "^.{0,400}$"),
    ],
)
def test_what_is_no_composition_is_refused_in_one_line(given: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as error:
        adapter_name(given)
    assert error.value.field == "adapter" and "\n" not in str(error.value)
