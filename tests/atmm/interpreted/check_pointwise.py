"""The kernels of norms, gates, rotations and KV writes in the interpreter, against eager torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import atmm
from atmm.triton import pointwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The interpreter truncates float32 to bfloat16 instead of rounding, at each of up to three roundings.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3 * 2**-7, torch.float16: 2 * 2**-10}


def rows(*shape: int, dtype: torch.dtype, gap: int = 3) -> torch.Tensor:
    """Random values with NaN between rows."""
    held = torch.full((*shape[:-1], shape[-1] + gap), float("nan"), dtype=dtype)
    own = held[..., : shape[-1]]
    generator = torch.Generator().manual_seed(sum(shape))
    return own.copy_(torch.randn(shape, generator=generator))


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    close = TOLERANCE[got.dtype]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=close, atol=close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num", "width"), ((1, 48), (3, 128), (5, 1000)))
def test_norm(num: int, width: int, dtype: torch.dtype) -> None:
    x, weight = rows(num, width, dtype=dtype), rows(width, dtype=dtype)
    x[0] *= 1e-3  # the epsilon counts
    wide = x.float()
    quotient = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    assert_close(atmm.rms_norm(x, weight.contiguous(), 1e-5), weight * quotient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num", (1, 3))
def test_norm_of_heads_in_a_wider_row(num: int, dtype: torch.dtype) -> None:
    weight = rows(16, dtype=dtype).contiguous()
    part = rows(num, 200, dtype=dtype).split([40, 112, 48], 1)[1]
    x = part.view(1, num, 7, 16)
    apart = x.contiguous()
    expected = torch.stack([atmm.rms_norm(apart[:, :, head], weight, 1e-5) for head in range(7)], 2)
    got = atmm.rms_norm(x, weight, 1e-5)
    assert got.shape == x.shape and got.is_contiguous()
    assert_close(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num", "width"), ((1, 48), (3, 1024), (2, 2500)))
def test_gate(num: int, width: int, dtype: torch.dtype) -> None:
    side_by_side = rows(num, 2 * width, dtype=dtype)
    gate, up = side_by_side[:, :width], side_by_side[:, width:]
    assert_close(atmm.gate_product(gate, up), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "num", "dim"), ((4, 4, 1, 16), (14, 2, 5, 64), (7, 1, 3, 128)))
def test_rotation(heads: int, kv_heads: int, num: int, dim: int, dtype: torch.dtype) -> None:
    together = rows(num, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q, k, _ = together.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
    q, k = q.view(num, heads, dim).transpose(0, 1), k.view(num, kv_heads, dim).transpose(0, 1)
    angles = torch.rand(num, dim // 2) * 100
    cos, sin = (torch.cat([wave(angles)] * 2, 1).to(dtype) for wave in (torch.cos, torch.sin))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    want = rotated(q), rotated(k)
    others = together[:, (heads + kv_heads) * dim :].clone()
    atmm.rotate(q, k, cos, sin)
    assert_close(q, want[0])
    assert_close(k, want[1])
    assert torch.equal(together[:, (heads + kv_heads) * dim :], others)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize(("num", "width"), ((1, 32), (4, 128), (3, 1100)))
def test_writes_to_the_cache(num: int, width: int, index: torch.dtype, dtype: torch.dtype) -> None:
    k, v = rows(num, width, dtype=dtype), rows(num, width, dtype=dtype, gap=5)
    matrix = torch.full((40, width), float("nan"), dtype=dtype)
    places = torch.tensor([31, 2, 17, 9][:num], dtype=index)
    atmm.write_kv(matrix[:36], matrix[4:], k, v, places)
    for place, key, value in zip(places.tolist(), k, v, strict=True):
        assert torch.equal(matrix[place], key) and torch.equal(matrix[4 + place], value)
    assert int(matrix.isnan().all(1).sum()) == 40 - 2 * num


def test_no_tokens() -> None:
    empty = torch.zeros(0, 16)
    assert atmm.rms_norm(empty, torch.ones(16), 1e-5).shape == (0, 16)
    assert atmm.gate_product(empty, empty).shape == (0, 16)
    atmm.rotate(torch.zeros(2, 0, 16), torch.zeros(1, 0, 16), empty, empty)
    atmm.write_kv(torch.zeros(3, 16), torch.zeros(3, 16), empty, empty, torch.zeros(0, dtype=torch.int64))


def test_inputs_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 16)
    with pytest.raises(ValueError, match="weight is"):
        atmm.rms_norm(x, torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="gate is"):
        atmm.gate_product(x, x[:1])
    with pytest.raises(ValueError, match="power of two"):
        atmm.rotate(torch.zeros(2, 2, 12), torch.zeros(1, 2, 12), torch.zeros(2, 12), torch.zeros(2, 12))
    with pytest.raises(ValueError, match="give one type"):
        atmm.rotate(x.view(2, 1, 16).double(), x.view(2, 1, 16), torch.zeros(1, 16), torch.zeros(1, 16))
    with pytest.raises(ValueError, match="last one must be 1"):
        atmm.rotate(torch.zeros(1, 16, 2).transpose(1, 2), torch.zeros(1, 2, 16), x, x)
    with pytest.raises(ValueError, match="k is"):
        atmm.write_kv(torch.zeros(3, 16), torch.zeros(3, 16), x, x, torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num", "width"), ((1, 48), (3, 1024), (2, 2500)))
def test_rounding_to_eight_bits(num: int, width: int, dtype: torch.dtype) -> None:
    x = rows(num, width, dtype=dtype)
    x[-1, : width // 2] = 0
    values = torch.full((num, width), float("nan")).to(torch.float8_e4m3fn)
    scales = torch.full((num, 1), float("nan"))
    pointwise.quantize_rows(values, scales, x, 448.0)
    exact = x.double().abs().amax(1, keepdim=True) / 448
    assert torch.allclose(scales.double(), exact, rtol=1e-6, atol=0)
    want = (x.double() / exact).float().to(torch.float8_e4m3fn).float()
    differ = values.float() != want
    assert differ.float().mean() < 1e-2, "quotients between two values"
    assert (values.float() - want).abs().le(want.abs() / 8 + 2**-9).all()


def test_rows_of_zeros_stay_zeros_in_eight_bits() -> None:
    values, scales = torch.ones(2, 40).to(torch.float8_e4m3fn), torch.zeros(2, 1)
    pointwise.quantize_rows(values, scales, torch.zeros(2, 40), 448.0)
    assert values.float().eq(0).all() and scales.gt(0).all()
