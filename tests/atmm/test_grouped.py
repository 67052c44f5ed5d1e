"""Weights in four and eight bits with scales by groups of inputs: rounding, products and merges, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import atmm
from atmm.grouped import Grouped
from atmm.int8 import multiplies_int8
from atmm.matmul import linear
from atmm.quantized import QuantizedWeight, quantized_bytes
from tests.atmm.test_quantized import quantized, random

KINDS = pytest.mark.parametrize(
    "kind",
    [
        Grouped(bits, group, symmetric=even)
        for bits in (4, 8)
        for group in (32, 64, 128, None)
        for even in (True, False)
    ],
    ids=lambda kind: f"{kind.name}-{kind.group}-{'symmetric' if kind.symmetric else 'offsets'}",
)
FOUR = Grouped(4, 32, symmetric=True)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
needs_kernel = pytest.mark.skipif(not multiplies_int8(), reason="needs a processor with products of bytes")


def inputs_rounded(x: Tensor) -> Tensor:
    """To eight bits by groups of 32, in float64."""
    groups = x.float().unflatten(-1, (-1, 32))
    scales = groups.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / 127
    return ((groups / scales).round().double() * scales).flatten(-2)


@KINDS
def test_weights_are_rounded_by_at_most_one_step(kind: Grouped) -> None:
    weight = random(3, 40, 256) * torch.logspace(-3, 1, 256)
    weight[0, 5] = 0
    held = quantized(weight, kind)
    groups = weight.unflatten(-1, (-1, kind.group or 256))
    error = (held.float() - weight).abs().view_as(groups)
    if kind.symmetric:  # a weight as large as the largest, with the other sign, is one step away
        largest = groups.abs().amax(-1, keepdim=True)
        steps = largest / 2 ** (kind.bits - 1)
        assert torch.allclose(held.float().view_as(groups).abs().amax(-1, keepdim=True), largest, rtol=1e-6, atol=0)
        assert torch.equal(held.rounded(held.float()), held.float()), "rounding twice changes nothing"
        assert (error <= 1.0001 * steps).all() and (error <= 0.5001 * steps).float().mean() > 0.95
    else:
        steps = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / (2**kind.bits - 1)
        assert (error <= 0.5001 * steps + 1e-6 * groups.abs()).all()
    assert held.float()[0, 5].eq(0).all(), "a row of zeros"


def test_groups_of_32_weights_take_five_bits_each() -> None:
    weight = random(2, 256, 512, dtype=torch.bfloat16)
    held = quantized(weight, FOUR)
    assert held.nbytes == quantized_bytes(FOUR, weight.shape) == weight.numel() * 5 // 8
    assert held.shape == weight.shape and held[1].shape == (256, 512)


@needs_kernel
@KINDS
@DTYPES
def test_products(kind: Grouped, dtype: torch.dtype) -> None:
    """Of few tokens and of many, with and without a bias, also for a part of the rows and strided inputs."""
    d_out, d_in = 70, 384
    held = quantized(random(2, d_out + 3, d_in), kind)[1].split([d_out, 3])[0]
    held = QuantizedWeight(held.values, held.scales, dtype, kind)
    for num_tokens in (1, 4, 5, 6, 13, 150):
        x = random(num_tokens, d_in + 7, seed=num_tokens).to(dtype)[:, :d_in]
        offset = random(d_out, seed=2).to(dtype) if num_tokens != 6 else None
        want = inputs_rounded(x) @ held.float().double().t() + (0 if offset is None else offset.double())
        got = linear(x, held, offset)
        assert got.dtype is dtype and got.shape == (num_tokens, d_out)
        close = 1e-4 if dtype is torch.float32 else 2**-8
        assert torch.allclose(got.double(), want, rtol=close, atol=close), num_tokens


@needs_kernel
@pytest.mark.parametrize("kind", [FOUR, Grouped(8, 32, symmetric=False)], ids=["int4", "int8"])
def test_layers_with_a_part_of_a_block(kind: Grouped) -> None:
    """A register has 128 weights in four bits, 64 in eight."""
    for d_in in (32, 96, 160):
        held = quantized(random(33, d_in), kind)
        for num_tokens in (2, 9):
            x = random(num_tokens, d_in, seed=1)
            want = inputs_rounded(x) @ held.float().double().t()
            assert torch.allclose(linear(x, held, None).double(), want, rtol=1e-4, atol=1e-4)


def test_a_large_input_costs_only_its_group_precision() -> None:
    held, x = quantized(random(70, 256), FOUR), random(3, 256, seed=1)
    exact = x[:, 32:] @ held.float()[:, 32:].t()
    x[:, 0] = 1000 * x.abs().max()
    held.scales[:, 0] = 0
    assert (linear(x, held, None) - exact).norm() < 0.01 * exact.norm()


@KINDS
@DTYPES
def test_products_without_the_kernel(kind: Grouped, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are not rounded there, and weights only to the type of the inputs."""
    held = quantized(random(70, 256), kind)
    held = QuantizedWeight(held.values, held.scales, dtype, kind)
    x, offset = random(13, 256, seed=1).to(dtype), random(70, seed=2).to(dtype)
    monkeypatch.setattr("atmm.grouped.library", lambda: None)
    monkeypatch.setattr("atmm.grouped.BLOCK", 256 * 9)
    want = x.double() @ held.float().double().t() + offset.double()
    got = linear(x, held, offset)
    assert got.dtype is dtype
    assert (got.double() - want).norm() < (1e-5 if dtype is torch.float32 else 2**-8) * want.norm()


@KINDS
def test_a_merge_rounds_the_exact_sum(kind: Grouped) -> None:
    base, out = quantized(random(3, 20, 128), kind), quantized(torch.zeros(3, 20, 128), kind)
    a, bt = random(3, 4, 128, seed=1), random(3, 4, 20, seed=2)
    everything = slice(None)
    atmm.merge_quantized(out, base, [(everything, everything, a, bt)])
    want = base.rounded(base.float() + bt.transpose(1, 2) @ a)
    assert ((out.float() - want).abs() > 1e-5).float().mean() < 1e-3
