"""The compiled rotary position embedding against eager torch, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

import atmm

pytestmark = pytest.mark.skipif(
    not atmm.serves_rotation(torch.device("cpu"), torch.float32), reason="no C++ compiler here"
)
DTYPES = (torch.float32, torch.bfloat16)


def eager(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The computation of the models' published code."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def made(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries of many heads, keys and values side by side, and cosines and sines."""
    generator = torch.Generator().manual_seed(tokens + dim)
    together = torch.randn(tokens, (heads + 2) * dim, generator=generator).to(dtype)
    angles = torch.rand(tokens, dim, generator=generator) * 100
    return together, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 16, 32, 64, 128])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 14), (5, 3), (200, 8)])
def test_equal_to_eager_torch_in_place(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    together, cos, sin = made(tokens, heads, dim, dtype)
    q, k, v = (part.view(tokens, -1, dim).transpose(0, 1) for part in together.split([heads * dim, dim, dim], 1))
    expected = eager(q, cos, sin), eager(k, cos, sin), v.clone()
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


def test_other_types_have_no_kernel() -> None:
    assert not atmm.serves_rotation(torch.device("cpu"), torch.float64)
