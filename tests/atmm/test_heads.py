"""Logits of several task heads over rows of one batch of hidden states."""

from __future__ import annotations

import pytest
import torch

from atmm import HeadRows, head_logits, reference


def heads(dtype: torch.dtype) -> list[HeadRows]:
    return [
        HeadRows(torch.randn(5, 32, dtype=dtype), torch.randn(5, dtype=dtype), torch.tensor([7, 0, 0])),
        HeadRows(torch.randn(1, 32, dtype=dtype), None, torch.tensor([3])),
        HeadRows(torch.randn(9, 32, dtype=dtype), torch.randn(9, dtype=dtype), torch.tensor([], dtype=torch.int64)),
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), ((torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.2)))
def test_each_head_reads_its_own_rows(dtype: torch.dtype, tolerance: float) -> None:
    h, rows = torch.randn(8, 32, dtype=dtype), heads(dtype)
    logits = head_logits(h, rows)
    assert [tuple(each.shape) for each in logits] == [(3, 5), (1, 1), (0, 9)]
    for each, expected in zip(logits, reference.head_logits(h, rows), strict=True):
        assert torch.allclose(each.double(), expected, atol=tolerance)
    bias = rows[0].bias
    assert bias is not None
    by_hand = sum(h[7, i].double() * rows[0].weight[2, i].double() for i in range(32)) + bias[2].double()
    assert abs(logits[0][0, 2].double() - by_hand) < tolerance


def test_logits_have_the_weights_precision() -> None:
    logits = head_logits(torch.randn(8, 32, dtype=torch.bfloat16), heads(torch.float32))
    assert all(each.dtype == torch.float32 for each in logits)


def test_no_heads_give_no_logits() -> None:
    assert head_logits(torch.randn(8, 32), []) == []


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_bias_may_have_any_stride(dtype: torch.dtype) -> None:
    h, weight, index = torch.randn(8, 32, dtype=dtype), torch.randn(5, 32, dtype=dtype), torch.tensor([1, 6])
    bias = torch.randn(5, 3, dtype=dtype)[:, 1]
    [logits] = head_logits(h, [HeadRows(weight, bias, index)])
    assert torch.equal(logits, head_logits(h, [HeadRows(weight, bias.contiguous(), index)])[0])
    [expected] = reference.head_logits(h, [HeadRows(weight, bias, index)])
    assert torch.allclose(logits.double(), expected, atol=0.2 if dtype == torch.bfloat16 else 1e-4)
