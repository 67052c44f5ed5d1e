"""Keys and values as rows of the KV cache, whatever order a projection stores them in."""

from __future__ import annotations

import pytest
import torch

import atmm
from vlora.models.attention import token_rows

TOKENS, HEADS, HEAD_DIM = 7, 2, 4


@pytest.mark.parametrize("by_column", [False, True])
def test_rows_are_contiguous_whatever_order_a_projection_stores(by_column: bool) -> None:
    projected = torch.randn(TOKENS, HEADS * HEAD_DIM)
    stored = projected.t().contiguous().t() if by_column else projected  # AMX products of few rows
    states = stored.view(1, TOKENS, HEADS, HEAD_DIM).transpose(1, 2)
    rows = token_rows(states)
    assert rows.stride(1) == 1 and torch.equal(rows, projected)
    cache = torch.zeros(2, 16, HEADS * HEAD_DIM)
    places = torch.arange(3, 3 + TOKENS)
    atmm.write_kv(cache[0], cache[1], rows, rows, places)
    assert torch.equal(cache[0, places], projected)
    if by_column:
        with pytest.raises(ValueError, match="contiguous rows"):
            atmm.write_kv(cache[0], cache[1], stored, stored, places)
