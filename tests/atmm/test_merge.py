"""`merge` against the float64 reference: rounding, views, scale, in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atmm import merge, processor, reference


@pytest.fixture(params=("compiled", "plain"), autouse=True)
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test with the compiled kernels, and as on a machine without a compiler."""
    if request.param == "plain":
        monkeypatch.setattr("atmm.operator.library", lambda: None)


@pytest.fixture(params=("bfloat16", "no bfloat16"), autouse=True)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test as on a processor with bfloat16 instructions, and as on one without."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: request.param == "bfloat16")


def weights(dtype: torch.dtype, rank: int = 8, n: int = 3, o: int = 70, i: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    base = torch.randn(n, o, i, generator=generator) * 0.05
    a = torch.randn(n, rank, i, generator=generator) * 0.1
    bt = torch.randn(n, rank, o, generator=generator) * 0.1
    return base.to(dtype), a.to(dtype), bt.to(dtype)


@pytest.mark.parametrize("rank", (1, 4, 5, 8, 64))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_merge_agrees_with_the_reference(dtype: torch.dtype, rank: int) -> None:
    base, a, bt = weights(dtype, rank)
    out = torch.empty_like(base)
    for scale in (1.0, -1.0, 0.3):
        merge(out, base, a, bt, scale)
        expected = reference.merge(base, a, bt, scale)
        assert torch.allclose(out.double(), expected, rtol=0, atol=100 * torch.finfo(dtype).eps)
        assert (expected - base.double()).abs().max() > 0.01


@pytest.mark.parametrize(("rank", "d_in"), ((1, 40), (8, 40), (64, 40), (20, 5000), (300, 321)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_merge_rounds_once(dtype: torch.dtype, rank: int, d_in: int) -> None:
    """Wide layers of high rank are merged in blocks of columns."""
    base, a, bt = weights(dtype, rank, i=d_in)
    out = torch.empty_like(base)
    merge(out, base, a, bt)
    expected = reference.merge(base, a, bt)
    nearest = expected.to(dtype)
    # Only if the exact sum is midway between two neighbours, the product's own rounding may decide.
    assert (out != nearest).double().mean() < 2e-3
    twice = (base + torch.einsum("nro,nri->noi", bt.double(), a.double()).to(dtype)) != nearest
    assert twice.double().mean() > 0.02  # rounding the delta first would differ
    error, best = (out.double() - expected).abs(), (nearest.double() - expected).abs()
    assert (error <= best * (1 + 1e-2) + 1e-7).all()


@pytest.mark.parametrize(("rank", "d_in"), ((8, 40), (20, 5120)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_merge_in_place_gives_the_same_bits(dtype: torch.dtype, rank: int, d_in: int) -> None:
    base, a, bt = weights(dtype, rank, i=d_in)
    out = torch.empty_like(base)
    merge(out, base, a, bt)
    merge(base, base, a, bt)
    assert torch.equal(out, base)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_merge_takes_strided_views_and_writes_nothing_else(dtype: torch.dtype) -> None:
    base, a, bt = weights(dtype)
    plain = torch.empty_like(base)
    merge(plain, base, a, bt)
    wide_a, wide_bt = torch.zeros(6, 8, 50, dtype=dtype), torch.zeros(6, 8, 99, dtype=dtype)
    wide_a[::2, :, 4:44], wide_bt[1::2, :, 9:79] = a, bt
    wide_base, wide_out = torch.zeros(3, 70, 64, dtype=dtype), torch.zeros(5, 80, 64, dtype=dtype)
    wide_base[:, :, 8:48] = base
    merge(wide_out[1:4, 5:75, 16:56], wide_base[:, :, 8:48], wide_a[::2, :, 4:44], wide_bt[1::2, :, 9:79])
    assert torch.allclose(wide_out[1:4, 5:75, 16:56].float(), plain.float(), rtol=2**-7, atol=1e-5)
    wide_out[1:4, 5:75, 16:56] = 0
    assert (wide_out == 0).all()


def test_a_delta_of_rank_0_gives_the_base() -> None:
    base, a, bt = weights(torch.bfloat16, 0)
    out = torch.empty_like(base)
    merge(out, base, a, bt)
    assert torch.equal(out, base)


def test_merge_does_not_change_base_and_factors() -> None:
    base, a, bt = weights(torch.bfloat16)
    copies = [tensor.clone() for tensor in (base, a, bt)]
    merge(torch.empty_like(base), base, a, bt, 0.5)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((base, a, bt), copies, strict=True))


def test_merge_refuses_mismatched_arguments() -> None:
    base, a, bt = weights(torch.float32)
    for arguments in (
        (base[:2], base, a, bt),
        (base, base, a[:, :4], bt),
        (base, base, bt, a),
        (base, base, a[:2], bt),
    ):
        with pytest.raises(ValueError, match="give a"):
            merge(*arguments)
    with pytest.raises(ValueError, match="one dtype"):
        merge(base, base, a.half(), bt)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_merge_agrees_with_the_reference_on_cuda(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    base, a, bt = (tensor.cuda() for tensor in weights(dtype))
    out = torch.empty_like(base)
    merge(out, base, a, bt)
    assert torch.allclose(out.double(), reference.merge(base, a, bt), rtol=torch.finfo(dtype).eps, atol=1e-6)
