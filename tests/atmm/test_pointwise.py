"""The compiled RMS norm and rotary position embedding against float64 and against eager torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import atmm

pytestmark = pytest.mark.skipif(
    not atmm.serves_rotation(torch.device("cpu"), torch.float32), reason="no C++ compiler here"
)
DTYPES = (torch.float32, torch.bfloat16)
EPSILON = 1e-6
WIDTHS = (1, 7, 8, 9, 31, 32, 33, 64, 100, 896)  # around one register, and around the registers of partial sums


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 1, 5, 200])
def test_norms_against_float64_and_eager_torch(rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(rows + width)
    x, weight = torch.randn(rows, width, generator=generator), torch.randn(width, generator=generator)
    wide = x.double()
    want = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()
    torch.testing.assert_close(atmm.rms_norm(x, weight, EPSILON).double(), want, rtol=1e-6, atol=1e-6)
    x, weight = x.bfloat16(), weight.bfloat16()
    quotient = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPSILON)
    got, eager = atmm.rms_norm(x, weight, EPSILON), weight * quotient.bfloat16()
    # The order of summation can flip a tie when the quotient is rounded, once in tens of thousands of values.
    assert rows == 0 or float((got != eager).float().mean()) < 1e-3
    torch.testing.assert_close(got, eager, rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_norms_are_independent_and_may_be_strided(dtype: torch.dtype) -> None:
    whole, weight = torch.randn(600, 96).to(dtype), torch.randn(64).to(dtype)
    x = whole[:, 16:80]
    together = atmm.rms_norm(x, weight, EPSILON)
    assert together.is_contiguous()
    for row in (0, 299, 599):
        assert torch.equal(together[row], atmm.rms_norm(x[row], weight, EPSILON))
    columns = atmm.rms_norm(whole.t()[:64].t(), weight, EPSILON)
    assert torch.equal(columns[5], atmm.rms_norm(whole[5, :64], weight, EPSILON))
    for value in (math.nan, math.inf):
        x[1, 7] = value
        y = atmm.rms_norm(x[:3], weight, EPSILON)
        assert bool(y[1, 7].isnan()) and bool(y[[0, 2]].isfinite().all())


def made(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries of many heads, keys and values side by side, and cosines and sines."""
    generator = torch.Generator().manual_seed(tokens + dim)
    together = torch.randn(tokens, (heads + 2) * dim, generator=generator).to(dtype)
    angles = torch.rand(tokens, dim, generator=generator) * 100
    return together, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 16, 32, 64, 128])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 14), (5, 3), (200, 8)])
def test_rotations_equal_those_of_eager_torch_in_place(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    together, cos, sin = made(tokens, heads, dim, dtype)
    q, k, v = (part.view(tokens, -1, dim).transpose(0, 1) for part in together.split([heads * dim, dim, dim], 1))

    def eager(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    expected = eager(q), eager(k), v.clone()
    with torch.inference_mode():
        atmm.rotate(q, k, cos, sin)
    for got, want in zip((q, k, v), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_in_its_pair(dtype: torch.dtype) -> None:
    together, cos, sin = made(2, 1, 64, dtype)
    q, k = together[:, :64].view(2, 1, 64).transpose(0, 1), together[:, 64:128].view(2, 1, 64).transpose(0, 1)
    q[0, 1, 5] = math.nan
    atmm.rotate(q, k, cos, sin)
    assert q.isnan().nonzero().tolist() == [[0, 1, 5], [0, 1, 37]] and not k.isnan().any()
    assert not atmm.serves_rotation(torch.device("cpu"), torch.float64)
