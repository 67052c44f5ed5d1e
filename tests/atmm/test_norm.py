"""The compiled RMS norm against a float64 reference and against eager torch."""

from __future__ import annotations

import math

import pytest
import torch

import atmm

pytestmark = pytest.mark.skipif(not atmm.serves_norm(torch.device("cpu"), torch.float32), reason="no C++ compiler here")
EPSILON = 1e-6
WIDTHS = (1, 7, 8, 9, 31, 32, 33, 64, 100, 896)  # around one register, and around the registers of partial sums


def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The computation of the models' published code."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return weight * wide.to(x.dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 1, 5, 200])
def test_against_float64(rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(rows + width)
    x = torch.randn(rows, width, generator=generator)
    weight = torch.randn(width, generator=generator)
    wide = x.double()
    want = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()
    torch.testing.assert_close(atmm.rms_norm(x, weight, EPSILON).double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_bfloat16_rounds_as_eager_torch_does(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(3, 40, width, generator=generator).bfloat16()
    weight = torch.randn(width, generator=generator).bfloat16()
    got, want = atmm.rms_norm(x, weight, EPSILON), eager(x, weight)
    # The order of summation can flip a tie when the quotient is rounded, once in tens of thousands of values.
    assert float((got != want).float().mean()) < 1e-3
    torch.testing.assert_close(got, want, rtol=2**-6, atol=1e-6)


def test_strided_rows_are_independent_of_each_other() -> None:
    whole = torch.randn(600, 96)
    x, weight = whole[:, 16:80], torch.randn(64)
    together = atmm.rms_norm(x, weight, EPSILON)
    assert together.is_contiguous()
    for row in (0, 299, 599):
        assert torch.equal(together[row], atmm.rms_norm(x[row], weight, EPSILON))
    assert torch.equal(
        atmm.rms_norm(whole.t()[:64].t(), weight, EPSILON)[5], atmm.rms_norm(whole[5, :64], weight, EPSILON)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_stays_in_its_row(dtype: torch.dtype, value: float) -> None:
    x = torch.ones(3, 40, dtype=dtype)
    x[1, 7] = value
    y = atmm.rms_norm(x, torch.ones(40, dtype=dtype), EPSILON)
    assert bool(y[1, 7].isnan()) and bool(y[[0, 2]].isfinite().all())


@pytest.mark.parametrize(
    "weight",
    [torch.ones(7), torch.ones(8, dtype=torch.bfloat16), torch.ones(16)[::2]],
    ids=["shape", "type", "strided"],
)
def test_a_weight_that_does_not_fit_is_refused(weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected contiguous \(8,\) torch.float32"):
        atmm.rms_norm(torch.ones(2, 8), weight, EPSILON)
