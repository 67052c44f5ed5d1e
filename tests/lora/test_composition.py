"""Composing adapters: their names, and factors in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.lora.made_adapters import adapter_of_run
from vlora.errors import BadAdapter, BadRequest
from vlora.lora.composition import compose
from vlora.lora.host_adapter import HostAdapter
from vlora.lora.layout import carve, run_bytes
from vlora.parallel.adapter_sharding import FactorShape
from vlora.types import adapter_name, composed_of

SITES = ("first", "second", "third")
DENSE = {"second": FactorShape(2, 6, 4), "third": FactorShape(3, 4, 8)}
BLOCKS = {"first": FactorShape(4, 6, 8, "blocks_a", 2), "second": FactorShape(6, 6, 4, "blocks_b", 2)}


def made(shapes: Mapping[str, FactorShape], version: str, dtype: torch.dtype = torch.float32) -> HostAdapter:
    """An adapter with random factors."""
    run = torch.zeros(run_bytes(shapes, dtype), dtype=torch.uint8)
    run.view(dtype).copy_(torch.randn(run.view(dtype).shape, generator=torch.Generator().manual_seed(ord(version))))
    return adapter_of_run(f"made@{version}", version, run, shapes, dtype)


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
        ("+", "'' is no adapter's name"),
        ("a+b+a", r"it names 'a' twice; give it one weight, as in 2\*a"),
        ("0*a+b", "the weight of 'a' is 0; it must be from -100 to 100, and not 0"),
        ("-0.0*a+b", "the weight of 'a' is -0"),
        ("nan*a+b", "the weight of 'a' is nan"),
        ("1e9*a+b", r"the weight of 'a' is 1e\+09; it must be from -100 to 100"),
        ("x*a+b", r"the weight 'x' of 'a' is not a number; write 0.7\*a\+0.3\*b"),
        ("*a", "the weight '' of 'a' is not a number"),
        ("a-0.5*b", "the weight 'a-0.5' of 'b' is not a number"),
        ({"a": True}, "the weight of 'a' is of type bool; it must be a number"),
        ({"a": "0.5"}, "the weight of 'a' is of type str"),
        ({"a": float("nan"), "b": 1}, r"composition 'a\+b' is invalid: the weight of 'a' is nan"),
        ({"a": 10**5000}, "the weight of 'a' is a whole number of 16610 bits; it must be from -100 to 100"),
        ({"a+b": 1}, r"'a\+b' is no adapter's name"),
        ({5: 1.0}, "5 is no adapter's name"),
        ("+".join("abcdefghi"), "it names 9 adapters; at most 8 can be composed"),
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
