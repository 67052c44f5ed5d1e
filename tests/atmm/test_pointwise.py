"""RMS norms, rotary position embedding, gates and KV writes, and on a GPU also rounding to eight bits.

Against float64 and against eager torch, with the compiled kernels of a CPU and in Triton's interpreter.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import atmm
from tests.atmm.cases import DTYPES as FLOATS
from tests.atmm.cases import INTERPRETED

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not atmm.serves_pointwise(torch.device("cpu"), torch.float32), reason="no C++ compiler here"
)
of_triton = pytest.mark.skipif(not INTERPRETED, reason="a kernel of Triton")
DTYPES = FLOATS if INTERPRETED else (torch.float32, torch.bfloat16)
EPSILON = 1e-6
# Widths around one register, and around the registers of partial sums.
NORMS = [(rows, width) for rows in (0, 1, 5, 200) for width in (1, 7, 8, 9, 31, 32, 33, 64, 100, 896)]
ROTATIONS = [(tokens, heads, 1, dim) for tokens, heads in ((1, 14), (5, 3), (200, 8)) for dim in (2, 16, 32, 64, 128)]
# The order of summation can flip a tie when the quotient is rounded. The interpreter truncates float32 to bfloat16
# instead of rounding, at each of up to three roundings.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2 * 2**-10}
if INTERPRETED:
    NORMS = [(0, 16), (1, 48), (3, 128), (5, 1000)]
    ROTATIONS = [(1, 4, 4, 16), (5, 14, 2, 64), (3, 7, 1, 128), (0, 2, 1, 16)]
    TOLERANCE[torch.bfloat16] = 3 * 2**-7


def rows(*shape: int, dtype: torch.dtype, gap: int = 3) -> Tensor:
    """Random values with NaN between rows."""
    held = torch.full((*shape[:-1], shape[-1] + gap), math.nan, dtype=dtype)
    return held[..., : shape[-1]].copy_(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))))


def assert_close(got: Tensor, want: Tensor) -> None:
    close = TOLERANCE[got.dtype]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=close, atol=close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num", "width"), NORMS)
def test_norms_equal_those_of_eager_torch(num: int, width: int, dtype: torch.dtype) -> None:
    x, weight = rows(num, width, dtype=dtype), rows(width, dtype=dtype).contiguous()
    x[:1] *= 1e-3  # the epsilon counts
    wide = x.double() if dtype is torch.float32 else x.float()
    eager = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(dtype)
    got = atmm.rms_norm(x, weight, EPSILON)
    assert_close(got, eager)
    # A tie is flipped once in tens of thousands of values.
    assert INTERPRETED or dtype is torch.float32 or num == 0 or float((got != eager).float().mean()) < 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_norms_are_independent_and_may_be_strided(dtype: torch.dtype) -> None:
    """Rows are parts of wider ones, or heads in parts of wider ones."""
    num = 6 if INTERPRETED else 600
    whole, weight = torch.randn(num, 200).to(dtype), torch.randn(16).to(dtype)
    x = whole.split([40, 112, 48], 1)[1].view(1, num, 7, 16)
    together = atmm.rms_norm(x, weight, EPSILON)
    assert together.shape == x.shape and together.is_contiguous()
    for row, head in ((0, 0), (num // 2, 6), (num - 1, 3)):
        assert_close(together[0, row, head], atmm.rms_norm(x[0, row, head], weight, EPSILON))
    columns = atmm.rms_norm(whole.t()[:16].t(), weight, EPSILON)
    assert torch.equal(columns[5], atmm.rms_norm(whole[5, :16], weight, EPSILON))
    for value in (math.nan, math.inf):
        whole[1, 7] = value
        y = atmm.rms_norm(whole[:3, :16], weight, EPSILON)
        assert bool(y[1, 7].isnan()) and bool(y[[0, 2]].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num", "heads", "kv_heads", "dim"), ROTATIONS)
def test_rotations_equal_those_of_eager_torch_in_place(
    num: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    """Queries, keys and values are side by side. NaN stays in its pair."""
    together = rows(num, (heads + 2 * kv_heads) * dim, dtype=dtype)
    parts = together.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
    q, k, v = (part.unflatten(1, (-1, dim)).transpose(0, 1) for part in parts)
    angles = torch.rand(num, dim, generator=torch.Generator().manual_seed(num + dim)) * 100
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def eager(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    q[:1, -1:, 0] = math.nan
    expected = eager(q), eager(k), v.clone()
    with torch.inference_mode():
        atmm.rotate(q, k, cos, sin)
    for got, want in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype] * INTERPRETED, atol=TOLERANCE[dtype] * INTERPRETED,
                                   equal_nan=True)  # fmt: skip
    assert int(q.isnan().sum()) == 2 * (num > 0)
    assert INTERPRETED or not atmm.serves_pointwise(torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num", "width"), ((1, 48), (3, 1024), (2, 2500), (0, 16), (7, 4865)))
def test_gates(num: int, width: int, dtype: torch.dtype) -> None:
    gate, up = rows(num, 2 * width, dtype=dtype).split(width, 1)
    gate.mul_(torch.logspace(-2, 1.9, width))  # up to some hundreds, of either sign
    gate[-1:, 5], gate[-1:, 6] = math.nan, -6e4
    exact = F.silu(gate.double()).to(dtype) * up
    got = atmm.gate_product(gate, up)
    close = TOLERANCE[dtype]
    torch.testing.assert_close(got, exact, rtol=close, atol=close, equal_nan=True)
    assert int(got.isnan().sum()) == min(num, 1)
    if dtype is torch.bfloat16 and not INTERPRETED:
        differs = (got != F.silu(gate) * up) & (gate.abs() < 50)
        assert int(differs.sum()) <= 2e-3 * got.numel() + 1, "a tie of silu"


@pytest.mark.skipif(INTERPRETED, reason="kernels of a CPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", (0, 5, 4099, 70_000))
def test_towers_rotate_in_float32_and_activate(count: int, dtype: torch.dtype) -> None:
    """Rotated results are rounded once, whatever the width of a head. Each operation of the quick gelu rounds."""
    for heads, dim in ((3, 80), (1, 6)):
        together = rows(count % 300, 3 * heads * dim, dtype=dtype)
        q, k, v = together.view(-1, 3, heads, dim).unbind(1) if count else together.new_empty(3, 0, heads, dim)
        angles = torch.rand(len(q), dim) * 100
        expected = *(_rotated(x.float(), angles[:, None]).to(dtype) for x in (q, k)), v.clone()
        atmm.rotate(q.transpose(0, 1), k.transpose(0, 1), angles.cos(), angles.sin())
        assert all(torch.equal(*pair) for pair in zip((q, k, v), expected, strict=True))
    x = (torch.randn(count) * torch.logspace(-4, 1, count)).to(dtype)
    x[:1] = math.nan
    eager, got = x * torch.sigmoid(1.702 * x), atmm.gelu(x, quick=True)
    torch.testing.assert_close(got, eager, rtol=TOLERANCE[dtype], atol=1e-20, equal_nan=True)
    assert dtype is torch.float32 or int((got != eager).sum()) <= 1 + 1e-3 * count
    exact = F.gelu(x.double(), approximate="tanh")
    close = 1e-5 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(atmm.gelu(x, quick=False).double(), exact, rtol=close, atol=1e-7, equal_nan=True)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num", "width"), ((0, 16), (1, 7), (5, 100), (200, 896)))
def test_norms_of_sums(num: int, width: int, dtype: torch.dtype) -> None:
    x, weight = rows(num, width, dtype=dtype).contiguous(), rows(width, dtype=dtype).contiguous()
    added = rows(num, width, dtype=dtype, gap=5)
    for values in (added, added.t().contiguous().t()):
        total = x.clone()
        normed = atmm.add_rms_norm(total, values, weight, EPSILON)
        assert torch.equal(total, x + added) and torch.equal(normed, atmm.rms_norm(total, weight, EPSILON))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num", "heads", "kv_heads", "dim"), ((1, 14, 2, 64), (5, 3, 1, 16), (200, 4, 4, 32), (0, 2, 1, 16))
)
def test_rotated_keys_are_written(num: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """As by `rotate` and `write_kv`. Other rows of the cache are kept."""
    width = kv_heads * dim
    together = rows(num, heads * dim + 2 * width, dtype=dtype)
    expected = together.clone()
    cos, sin = (rows(num, dim, dtype=dtype).contiguous() for _ in range(2))
    places = torch.randperm(num + 5)[:num]
    caches = [torch.full((2 * num + 10, width), 7, dtype=dtype) for _ in range(2)]
    for values, matrix, fused in ((expected, caches[0], False), (together, caches[1], True)):
        q, k, v = values.split([heads * dim, width, width], 1)
        queries, keys = (part.unflatten(1, (-1, dim)).transpose(0, 1) for part in (q, k))
        cache = matrix[: num + 5], matrix[num + 5 :]
        if fused:
            atmm.rotate_and_write(queries, keys, v, cos, sin, *cache, places)
        else:
            atmm.rotate(queries, keys, cos, sin)
            atmm.write_kv(*cache, k, v, places)
    assert torch.equal(together, expected) and torch.equal(*caches)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", (torch.int32, torch.int64) if INTERPRETED else (torch.int64,), ids=str)
@pytest.mark.parametrize(("num", "width"), ((1, 32), (4, 128), (3, 1100), (0, 16)))
def test_writes_to_the_cache(num: int, width: int, index: torch.dtype, dtype: torch.dtype) -> None:
    k, v = rows(num, width, dtype=dtype), rows(num, width, dtype=dtype, gap=5)
    matrix = torch.full((40, width), math.nan, dtype=dtype)
    places = torch.tensor([31, 2, 17, 9][:num], dtype=index)
    atmm.write_kv(matrix[:36], matrix[4:], k, v, places)
    for place, key, value in zip(places.tolist(), k, v, strict=True):
        assert torch.equal(matrix[place], key) and torch.equal(matrix[4 + place], value)
    assert int(matrix.isnan().all(1).sum()) == 40 - 2 * num


@of_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num", "width"), ((1, 48), (3, 1024), (2, 2500)))
def test_rounding_to_eight_bits(num: int, width: int, dtype: torch.dtype) -> None:
    from atmm.triton.pointwise import quantize_rows

    x = torch.cat([rows(num, width, dtype=dtype), torch.zeros(1, width, dtype=dtype)])
    x[0, : width // 2] = 0
    values, scales = torch.full(x.shape, math.nan).to(torch.float8_e4m3fn), torch.full((num + 1, 1), math.nan)
    quantize_rows(values, scales, x, 448.0)
    assert values[-1].float().eq(0).all() and scales.gt(0).all(), "a row of zeros"
    exact = x[:-1].double().abs().amax(1, keepdim=True) / 448
    assert torch.allclose(scales[:-1].double(), exact, rtol=1e-6, atol=0)
    want, got = (x[:-1].double() / exact).float().to(torch.float8_e4m3fn).float(), values[:-1].float()
    assert (got != want).float().mean() < 1e-2, "quotients between two values"
    assert (got - want).abs().le(want.abs() / 8 + 2**-9).all()


def test_inputs_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 16)
    q, cache = x.view(2, 1, 16), torch.zeros(3, 16)
    for call, words in (
        (lambda: atmm.rms_norm(x, torch.ones(8), 1e-5), "weight is"),
        (lambda: atmm.gate_product(x, x[:1]), "gate is"),
        (lambda: atmm.rotate(q[:, :, :7], q[:1, :, :7], x[:1, :7], x[:1, :7]), "power of two"),
        (lambda: atmm.rotate(q.double(), q, x[:1], x[:1]), "give one type"),
        (lambda: atmm.rotate(torch.zeros(1, 16, 2).transpose(1, 2), torch.zeros(1, 2, 16), x, x), "last one must be 1"),
        (lambda: atmm.write_kv(cache, cache, x, x, torch.zeros(3, dtype=torch.int64)), "k is"),
        (lambda: atmm.add_rms_norm(x, x[:1], x[0], 1e-5), "added"),
        (lambda: atmm.rotate_and_write(q, q, x[:1], x[:1], x[:1], cache, cache, torch.zeros(1).long()), "kv_head|k is"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
