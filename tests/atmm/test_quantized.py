"""Weights in four and eight bits, with scales by row or by groups of inputs: rounding, views, products and merges."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import atmm
from atmm.formats import FP8_CAPABILITY, Fp8, Int8, multiplies_int8
from atmm.grouped import Grouped
from atmm.matmul import linear
from atmm.quantized import QuantizedWeight, WeightFormat, quantized_bytes, quantized_empty
from tests import device

CPU = torch.device("cpu")
FP8, INT8 = Fp8(), Int8()
FOUR = Grouped(4, 32, symmetric=True)
GROUPED = [
    Grouped(bits, group, symmetric=even) for bits in (4, 8) for group in (32, 64, 128, None) for even in (True, False)
]


def name_of(kind: WeightFormat) -> str:
    if not isinstance(kind, Grouped):
        return kind.name
    return f"{kind.name}-{kind.group}-{'symmetric' if kind.symmetric else 'offsets'}"


KINDS = pytest.mark.parametrize("kind", [FP8, INT8, *GROUPED], ids=name_of)
BY_ROW = pytest.mark.parametrize("kind", [FP8, INT8], ids=name_of)
BY_GROUP = pytest.mark.parametrize("kind", GROUPED, ids=name_of)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
needs_int8 = pytest.mark.skipif(not multiplies_int8(), reason="needs a processor with products of bytes")
HALF_STEP = 2**-4  # of e4m3, relative to the value
WHOLE = slice(None)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=device)


def quantized(weight: Tensor, kind: WeightFormat = FP8) -> QuantizedWeight:
    held = quantized_empty(kind, CPU, empty)(list(weight.shape), weight.dtype, CPU)
    assert isinstance(held, QuantizedWeight)
    return held.copy_(weight)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs_rounded(x: Tensor) -> Tensor:
    """To eight bits by groups of 32, in float64."""
    groups = x.float().unflatten(-1, (-1, 32))
    scales = groups.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / 127
    return ((groups / scales).round().double() * scales).flatten(-2)


@BY_ROW
@DTYPES
def test_weights_with_scales_by_row_are_rounded_by_at_most_half_a_step(dtype: torch.dtype, kind: WeightFormat) -> None:
    weight = random(3, 40, 70, dtype=dtype) * torch.logspace(-3, 1, 40)[:, None].to(dtype)
    weight[0, 5] = 0
    held = quantized(weight, kind)
    largest = weight.float().abs().amax(-1, keepdim=True)
    error = (held.float() - weight.float()).abs()
    step = HALF_STEP * weight.float().abs() + largest * 2**-10 / 448 if kind is FP8 else largest * 0.5001 / 127
    assert (error <= step + 1e-12).all()
    assert held.float()[0, 5].eq(0).all(), "a row of zeros"
    assert torch.allclose(held.float().abs().amax(-1, keepdim=True), largest, rtol=1e-6, atol=0)
    assert torch.allclose(held.rounded(held.float()), held.float(), rtol=1e-6, atol=0)


@BY_GROUP
def test_weights_with_scales_by_group_are_rounded_by_at_most_one_step(kind: Grouped) -> None:
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


@pytest.mark.parametrize(("kind", "share"), [(FP8, 0.52), (INT8, 0.52), (FOUR, 5 / 16)], ids=("fp8", "int8", "four"))
def test_bytes_of_weights_and_scales(kind: WeightFormat, share: float) -> None:
    weight = random(2, 256, 512, dtype=torch.bfloat16)
    held = quantized(weight, kind)
    assert held.nbytes == quantized_bytes(kind, weight.shape) <= share * weight.nbytes
    assert held.dtype is torch.bfloat16 and held.shape == weight.shape and held[1].shape == (256, 512)


def test_large_weights_are_quantized_in_blocks_and_parts_are_views(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(10, 7)
    whole = quantized(weight)
    monkeypatch.setattr("atmm.quantized.BLOCK", 21)
    assert torch.equal(quantized(weight).float(), whole.float())
    monkeypatch.setattr("atmm.formats.BLOCK", 14)
    x = random(2, 7, seed=1)
    assert torch.allclose(linear(x, quantized(weight), None), linear(x, whole, None), atol=1e-6)
    held = quantized(random(2, 12, 16))
    first, second = held[1].split([4, 8])
    assert first.shape == (4, 16) and second.values.data_ptr() == held.values[1, 4].data_ptr()
    second.copy_(first[:1].float().expand(8, 16))
    assert torch.equal(held.float()[1, 4:], held.float()[1, :1].expand(8, 16))
    copy = quantized(random(2, 12, 16, seed=1)).copy_(held)
    assert torch.equal(copy.float(), held.float())


@BY_ROW
@DTYPES
@pytest.mark.parametrize(("d_out", "d_in"), [(24, 50), (7, 64), (3, 200)])
def test_products_with_scales_by_row(kind: WeightFormat, d_out: int, d_in: int, dtype: torch.dtype) -> None:
    held = quantized(random(d_out, d_in, dtype=dtype), kind)
    for num_tokens in (1, 3, 12):
        x = random(2, num_tokens, d_in, seed=1, dtype=dtype)
        offset = random(d_out, seed=2, dtype=dtype) if num_tokens != 3 else None
        want = held.rounded(x).double() @ held.float().double().t() + (0 if offset is None else offset.double())
        got = linear(x, held, offset)
        assert got.dtype is dtype and got.shape == (2, num_tokens, d_out)
        close = 2e-5 if dtype is torch.float32 else 2**-8
        assert torch.allclose(got.double(), want, rtol=close, atol=close), num_tokens


@needs_int8
@BY_GROUP
@DTYPES
def test_products_with_scales_by_group(kind: Grouped, dtype: torch.dtype) -> None:
    """Of few tokens and of many, with and without a bias, also for a part of the rows and strided inputs.

    A register has 128 weights in four bits, 64 in eight: some layers have a part of a register.
    """
    d_out = 70
    # A group of a whole row may end within a register.
    for d_in in (384, 32, 96, 160) if kind.group == 32 else (384 if kind.group else 416,):
        held = quantized(random(2, d_out + 3, d_in), kind)[1].split([d_out, 3])[0]
        held = QuantizedWeight(held.values, held.scales, dtype, kind)
        for num_tokens in (1, 4, 5, 6, 13, 150):
            x = random(num_tokens, d_in + 7, seed=num_tokens).to(dtype)[:, :d_in]
            offset = random(d_out, seed=2).to(dtype) if num_tokens != 6 else None
            want = inputs_rounded(x) @ held.float().double().t() + (0 if offset is None else offset.double())
            got = linear(x, held, offset)
            assert got.dtype is dtype and got.shape == (num_tokens, d_out)
            close = 1e-4 if dtype is torch.float32 else 2**-8
            assert torch.allclose(got.double(), want, rtol=close, atol=close), (d_in, num_tokens)


@needs_int8
@pytest.mark.parametrize(("num_tokens", "d_in"), [(8, 257), (9, 300), (13, 257), (16, 300), (17, 257), (500, 1030)])
def test_integer_products_of_a_token_do_not_depend_on_the_others(num_tokens: int, d_in: int) -> None:
    held, offset = quantized(random(70, d_in), INT8), random(70, seed=2)
    x = random(num_tokens, d_in + 20, seed=1)[:, :d_in]
    together = linear(x, held, offset)
    assert torch.equal(together, torch.cat([linear(row[None], held, offset) for row in x]))


def test_a_large_input_costs_only_its_group_precision() -> None:
    held, x = quantized(random(70, 256), FOUR), random(3, 256, seed=1)
    exact = x[:, 32:] @ held.float()[:, 32:].t()
    x[:, 0] = 1000 * x.abs().max()
    held.scales[:, 0] = 0
    assert (linear(x, held, None) - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("kind", [INT8, *GROUPED], ids=name_of)
@DTYPES
def test_products_without_the_kernel(kind: WeightFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With scales by group, inputs are not rounded there, and weights only to the type of the inputs."""
    held = quantized(random(70, 256), kind)
    held = QuantizedWeight(held.values, held.scales, dtype, kind)
    x, offset = random(13, 256, seed=1).to(dtype), random(70, seed=2).to(dtype)
    for module in ("grouped", "formats"):
        monkeypatch.setattr(f"atmm.{module}.library", lambda: None)
    monkeypatch.setattr("atmm.grouped.BLOCK", 256 * 9)
    read = held.rounded(x) if kind is INT8 else x
    want = read.double() @ held.float().double().t() + offset.double()
    got = linear(x, held, offset)
    assert got.dtype is dtype
    assert (got.double() - want).norm() < (1e-5 if dtype is torch.float32 else 2**-8) * want.norm()


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_torchs_scaled_product_computes_the_same(num_tokens: int) -> None:
    """The operator that a GPU uses, as torch computes it on a CPU."""
    held, x = quantized(random(32, 48)), random(num_tokens, 48, seed=1)
    values, scales = held.format.encode(x)
    try:
        got = torch._scaled_mm(  # noqa: SLF001  (torch)
            values, held.values.t(), scales, held.scales.t(), out_dtype=torch.float32
        )
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"this version of torch has no scales by row on a CPU: {error}")
    assert torch.allclose(got, linear(x, held, None), rtol=1e-5, atol=1e-5)


@KINDS
def test_a_merge_rounds_the_exact_sum(kind: WeightFormat) -> None:
    base, out = quantized(random(3, 20, 128), kind), quantized(torch.zeros(3, 20, 128), kind)
    a, bt = random(3, 4, 128, seed=1), random(3, 4, 20, seed=2)
    atmm.merge_quantized(out, base, [(WHOLE, WHOLE, a, bt)])
    want = base.rounded(base.float() + bt.transpose(1, 2) @ a)
    assert ((out.float() - want).abs() > 1e-5).float().mean() < 1e-3


def test_a_merge_of_blocks_scales_whole_rows() -> None:
    base, out = quantized(random(1, 20, 30)), quantized(torch.zeros(1, 20, 30))
    a, bt = random(1, 2, 15, seed=1), random(1, 2, 20, seed=2)
    atmm.merge_quantized(out, base, [(WHOLE, slice(0, 15), a, bt), (WHOLE, slice(15, 30), -a, bt)])
    want = base.float() + bt.transpose(1, 2) @ torch.cat([a, -a], 2)
    assert ((out.float() - base.rounded(want)).abs() > 1e-5).float().mean() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 5, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_products_on_the_device(num_tokens: int, bias: bool) -> None:
    """On a GPU by torch's operator, with inputs rounded by a kernel; also for a part of the rows and strided inputs."""
    chosen = torch.device(device.name)
    if chosen.type == "cuda" and torch.cuda.get_device_capability(chosen) < FP8_CAPABILITY:
        pytest.skip("this GPU has no eight-bit products")
    host = quantized(random(2, 96, 64, dtype=torch.bfloat16))
    allocated = quantized_empty(Fp8(), chosen, empty)([2, 96, 64], torch.bfloat16, chosen)
    assert isinstance(allocated, QuantizedWeight)
    held = allocated.copy_(host)[1].split([32, 64])[1]
    x = random(num_tokens, 128, seed=1, dtype=torch.bfloat16).to(chosen)[:, :64]
    offset = random(64, seed=2, dtype=torch.bfloat16).to(chosen) if bias else None
    read = host.rounded(x.cpu()).double()
    want = read @ host.float()[1, 32:].double().t() + (0 if offset is None else offset.cpu().double())
    got = linear(x, held, offset).cpu().double()
    assert torch.allclose(got, want, rtol=2**-7, atol=2**-5)


@pytest.mark.gpu
def test_merges_on_the_device() -> None:
    chosen = torch.device(device.name)
    base = quantized(random(2, 32, 48, dtype=torch.bfloat16))
    a, bt = random(2, 16, 48, seed=1, dtype=torch.bfloat16), random(2, 16, 32, seed=2, dtype=torch.bfloat16)
    allocate = quantized_empty(Fp8(), chosen, empty)
    held, out = (allocate([2, 32, 48], torch.bfloat16, chosen) for _ in range(2))
    assert isinstance(held, QuantizedWeight) and isinstance(out, QuantizedWeight)
    held.copy_(base)
    atmm.merge_quantized(out, held, [(WHOLE, WHOLE, a.to(chosen), bt.to(chosen))])
    want = base.rounded(base.float() + bt.float().transpose(1, 2) @ a.float())
    assert ((out.float().cpu() - want).abs() > 1e-4).float().mean() < 1e-2
