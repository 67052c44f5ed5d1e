"""Products with integers, and merges into them, in the interpreter: against float64 on the restored weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atmm import reference
from atmm.formats import Int8
from atmm.grouped import Grouped
from atmm.quantized import QuantizedWeight
from atmm.triton import products
from atmm.triton.merging import merge_groups, merge_rows
from tests.atmm.cases import inside, poisoned_memory
from tests.atmm.test_quantized import GROUPED, name_of

INT8 = Int8()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def held(kind: Any, weight: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Weights [..., o, i] as rows of a joined matrix. Bytes behind a row are 255, scales behind one not numbers."""
    values, scales = kind.encode(weight)
    around = torch.full((*values.shape[:-2], values.shape[-2] + 8, values.shape[-1] + 16), -1).to(values.dtype)
    rows = around[..., 8:, : values.shape[-1]].copy_(values)
    gap = 3 if isinstance(kind, Grouped) else 0
    wide = torch.full((*scales.shape[:-2], scales.shape[-2] + 8, scales.shape[-1] + gap), torch.nan)
    return QuantizedWeight(rows, wide[..., 8:, : scales.shape[-1]].copy_(scales), dtype, kind)


@pytest.mark.parametrize(
    ("num_tokens", "d_out", "splits", "dtype"),
    ((1, 70, 1, torch.bfloat16), (5, 130, 4, torch.float32), (40, 64, 2, torch.float16), (150, 72, 1, torch.bfloat16)),
    ids=str,
)
@pytest.mark.parametrize("kind", (INT8, *GROUPED), ids=name_of)
def test_products(
    kind: Any, num_tokens: int, d_out: int, splits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "num_splits", lambda *_: splits)
    generator = torch.Generator().manual_seed(num_tokens)
    for d_in in (256, 160) if getattr(kind, "group", None) in (None, 32) else (256, 384):
        weight = held(kind, torch.randn(d_out, d_in, generator=generator), dtype)
        x = inside(torch.randn(num_tokens, d_in, generator=generator).to(dtype), 16)
        bias = torch.randn(d_out, generator=generator).to(dtype) if num_tokens != 5 else None
        restored = weight.float().to(dtype)
        want = x.double() @ restored.double().t() + (0 if bias is None else bias.double())
        integers = kind.integers
        got = products.multiply(x, weight.values, weight.scales, bias, integers)
        assert got.dtype is dtype and got.shape == (num_tokens, d_out)
        error = (got.double() - want).norm() / want.norm()
        assert error < TOLERANCE[dtype], (d_in, float(error))


def test_splits_fill_a_gpu() -> None:
    cpu = torch.device("cpu")
    shapes = ((72, 28), (56, 28), (592, 28), (56, 148), (1, 4), (1, 148))
    assert [products.num_splits(*shape, cpu) for shape in shapes] == [4, 8, 1, 8, 2, 8]
    nothing = products.multiply(torch.empty(0, 32), torch.empty(3, 32), torch.empty(3, 1), None, INT8.integers)
    assert nothing.shape == (0, 3)


@pytest.mark.parametrize("o, i", ((70, 160), (128, 256)))
@pytest.mark.parametrize(("rank", "dtype"), ((1, torch.float16), (24, torch.bfloat16)), ids=str)
@pytest.mark.parametrize("kind", (INT8, *(each for each in GROUPED if each.group)), ids=name_of)
def test_merges_round_the_exact_sum(kind: Any, dtype: torch.dtype, rank: int, o: int, i: int) -> None:
    if i % kind.alignment:
        i = 128
    generator = torch.Generator().manual_seed(rank)
    base = held(kind, torch.randn(2, o, i, generator=generator) * 0.1, dtype)
    out = held(kind, torch.zeros(2, o, i), dtype)
    factors = (torch.randn(2, rank, width, generator=generator).to(dtype) * 0.1 for width in (i, o))
    a, bt = (inside(each.view(2 * rank, -1), 16).unflatten(0, (2, rank)) for each in factors)
    weights = out.values, out.scales, base.values, base.scales
    if isinstance(kind, Grouped):
        merge_groups(*weights, a, bt, kind.integers)
    else:
        merge_rows(*weights, a, bt, kind.largest)
    exact = reference.merge(base.float(), a, bt)
    values, right_scales = kind.encode(exact.float())
    right = kind.decode(values, right_scales)
    torch.testing.assert_close(out.scales, right_scales, rtol=1e-4, atol=1e-6)
    unequal = (out.float() - right).abs() > 1e-4 * right.abs().max()
    assert unequal.double().mean() < 2e-3  # sums at a border between two values
    assert (exact - base.float().double()).abs().max() > 0.01
