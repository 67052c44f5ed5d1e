"""`merge` against the float64 reference: rounding, views, scale, in place; on a CPU and in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import atmm
from atmm import processor, reference
from tests.atmm.cases import DTYPES, INTERPRETED, of_the_cpu

Merge = Callable[[Tensor, Tensor, Tensor, Tensor, float], None]
BACKENDS = [("triton", "")] if INTERPRETED else list(itertools.product(("compiled", "plain"), ("bfloat16", "none")))


@pytest.fixture(params=BACKENDS, ids=", ".join)
def merge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Merge:
    """With and without the compiled kernels, and with and without bfloat16 instructions."""
    kernels, instructions = request.param
    if kernels == "triton":
        from atmm.triton.merging import merge as interpreted

        return interpreted
    if kernels == "plain":
        monkeypatch.setattr("atmm.operator.library", lambda: None)
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: instructions == "bfloat16")
    return atmm.merge


def weights(dtype: torch.dtype, rank: int = 8, n: int = 3, o: int = 70, i: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    base = torch.randn(n, o, i, generator=generator) * 0.05
    a = torch.randn(n, rank, i, generator=generator) * 0.1
    bt = torch.randn(n, rank, o, generator=generator) * 0.1
    return base.to(dtype), a.to(dtype), bt.to(dtype)


SHAPES = [(1, 70, 40), (4, 70, 40), (5, 1, 1), (8, 5, 16), (64, 8, 33), (6, 70, 96), (20, 70, 5000)]
"""Rank, outputs and inputs. Wide layers of high rank are merged in blocks of columns."""
if INTERPRETED:
    SHAPES = [(1, 70, 40), (8, 128, 256), (65, 64, 130), (8, 70, 40)]


@pytest.mark.parametrize(("rank", "o", "i"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_agrees_with_the_reference(merge: Merge, dtype: torch.dtype, rank: int, o: int, i: int) -> None:
    """Also in place, of values that are not finite, and undone by a merge with the other sign."""
    base, a, bt = weights(dtype, rank, o=o, i=i)
    base[0, 0, 0], base[1, 0, 0] = float("nan"), float("inf")
    copies = [tensor.clone() for tensor in (base, a, bt)]
    out = torch.empty_like(base)
    # One unit in the last place: the sum has the product's precision and is rounded once.
    eps = 50 * torch.finfo(dtype).eps if dtype in (torch.float64, torch.float32) else torch.finfo(dtype).eps
    eps *= 1 + INTERPRETED  # it truncates
    for scale in (1.0, -1.0, 0.3):
        merge(out, base, a, bt, scale)
        expected = reference.merge(base, a, bt, scale)
        torch.testing.assert_close(out.double(), expected, rtol=eps, atol=eps / 10, equal_nan=True)
        moved = (expected - base.double()).nan_to_num(0).abs().max()
        assert moved > 0.001, "a missing delta would not be noticed"
    assert all(
        torch.equal(one.nan_to_num(3), two.nan_to_num(3)) for one, two in zip((base, a, bt), copies, strict=True)
    )
    merge(base, base, a, bt, 0.3)
    torch.testing.assert_close(base, out, rtol=0, atol=0, equal_nan=True)
    merge(base, base, a, bt, -0.3)
    torch.testing.assert_close(base.double(), copies[0].double(), rtol=2 * eps, atol=2 * eps, equal_nan=True)


@of_the_cpu
@pytest.mark.parametrize(("rank", "d_in"), ((1, 40), (8, 40), (64, 40), (20, 5000), (300, 321)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_merge_rounds_once(merge: Merge, dtype: torch.dtype, rank: int, d_in: int) -> None:
    base, a, bt = weights(dtype, rank, i=d_in)
    out = torch.empty_like(base)
    merge(out, base, a, bt, 1.0)
    expected = reference.merge(base, a, bt)
    nearest = expected.to(dtype)
    # Only if the exact sum is midway between two neighbours, the product's own rounding may decide.
    assert (out != nearest).double().mean() < 2e-3
    twice = (base + torch.einsum("nro,nri->noi", bt.double(), a.double()).to(dtype)) != nearest
    assert twice.double().mean() > 0.02  # rounding the delta first would differ
    error, best = (out.double() - expected).abs(), (nearest.double() - expected).abs()
    assert (error <= best * (1 + 1e-2) + 1e-6).all()


@of_the_cpu
def test_bfloat16_is_rounded_as_torch_does(merge: Merge) -> None:
    rounded_as_torch_does(merge)


def rounded_as_torch_does(merge: Merge) -> None:
    generator = torch.Generator().manual_seed(0)
    # Products of two bfloat16 values are exact in float32, and one in 2^7 of them is midway between two neighbours.
    a, bt = (torch.randn(1, 1, size, generator=generator).bfloat16() for size in (200, 100))
    a[0, 0, :4] = torch.tensor([float("nan"), float("inf"), 3e38, 0.0])
    bt[0, 0, 0] = 1.0
    out = torch.empty(1, 100, 200, dtype=torch.bfloat16)
    merge(out, torch.zeros_like(out), a, bt, 1.0)
    expected = (bt.float().transpose(1, 2) * a.float()).bfloat16()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_merge_takes_strided_views_and_writes_nothing_else(merge: Merge, dtype: torch.dtype) -> None:
    base, a, bt = weights(dtype)
    plain = torch.empty_like(base)
    merge(plain, base, a, bt, 1.0)
    wide_a, wide_bt = torch.zeros(6, 8, 50, dtype=dtype), torch.zeros(6, 8, 99, dtype=dtype)
    wide_a[::2, :, 4:44], wide_bt[1::2, :, 9:79] = a, bt
    wide_base, wide_out = torch.zeros(3, 70, 64, dtype=dtype), torch.zeros(5, 80, 64, dtype=dtype)
    wide_base[:, :, 8:48] = base
    merge(wide_out[1:4, 5:75, 16:56], wide_base[:, :, 8:48], wide_a[::2, :, 4:44], wide_bt[1::2, :, 9:79], 1.0)
    assert torch.allclose(wide_out[1:4, 5:75, 16:56].float(), plain.float(), rtol=2**-7, atol=1e-5)
    wide_out[1:4, 5:75, 16:56] = 0
    assert (wide_out == 0).all()


@of_the_cpu
def test_a_delta_of_rank_0_gives_the_base_and_threads_change_no_bit(merge: Merge) -> None:
    base, a, bt = weights(torch.bfloat16, 0)
    out = torch.empty_like(base)
    merge(out, base, a, bt, 1.0)
    assert torch.equal(out, base)
    base, a, bt = weights(torch.bfloat16, 20, n=2, o=75, i=5120)  # blocks of columns
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(torch.empty_like(base))
            merge(found[-1], base, a, bt, 1.0)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_merge_agrees_with_the_reference_on_cuda(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    base, a, bt = (tensor.cuda() for tensor in weights(dtype))
    out = torch.empty_like(base)
    atmm.merge(out, base, a, bt)
    assert torch.allclose(out.double(), reference.merge(base, a, bt), rtol=torch.finfo(dtype).eps, atol=1e-6)
