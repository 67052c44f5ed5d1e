"""Decoding over paged KV: the KV of other requests cannot affect a request."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import atmm
from vlora.models.attention import KVCache, PagedDecodes, Queries, StepAttention, paged_attention
from vlora.models.forward_batch import GatheredDecodes

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 16
CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    layer_idx = 0


def attend(matrix: torch.Tensor, contexts: list[list[int]], *, compiled: bool) -> torch.Tensor:
    """Attention of one new token per context, [requests, heads, dim]; a context ends with the new token's own row."""
    generator = torch.Generator().manual_seed(1)
    num = len(contexts)
    query = torch.randn(1, HEADS, num, DIM, generator=generator)
    key, value = (torch.randn(1, KV_HEADS, num, DIM, generator=generator) for _ in range(2))
    arrays = [np.array(rows) for rows in contexts]
    queries: list[Queries] = [
        PagedDecodes.of(range(num), arrays) if compiled else GatheredDecodes.of(torch.arange(num), arrays)
    ]
    written = torch.tensor([rows[-1] for rows in contexts])
    step = StepAttention(KVCache(matrix.clone(), 1, BLOCK), written, queries, queries)
    out, _ = paged_attention(Layer(), query, key, value, None, vlora_step=step)
    return out[0]


@pytest.mark.parametrize("compiled", (True, False), ids=("compiled", "plain"))
@pytest.mark.parametrize("lengths", ((6, 7), (2, 9)), ids=("padded", "ragged"))
def test_nan_in_another_requests_kv_does_not_spread(lengths: tuple[int, int], compiled: bool) -> None:
    """Two requests in separate blocks, with NaN in all other rows."""
    if compiled and not atmm.serves_attention(CPU, torch.float32):
        pytest.skip("no C++ compiler here")
    matrix = torch.randn(6 * BLOCK, KV_HEADS * DIM, generator=torch.Generator().manual_seed(0))
    contexts = [list(range(2 * BLOCK * block, 2 * BLOCK * block + length)) for block, length in enumerate(lengths, 1)]
    poisoned = torch.full_like(matrix, math.nan)
    for rows in contexts:
        for side in (0, BLOCK):  # keys, then values
            own = [row + side for row in rows]
            poisoned[own] = matrix[own]
    clean = attend(matrix, contexts, compiled=compiled)
    assert torch.equal(attend(poisoned, contexts, compiled=compiled), clean) and clean.isfinite().all()


def test_compiled_and_plain_attention_agree() -> None:
    if not atmm.serves_attention(CPU, torch.float32):
        pytest.skip("no C++ compiler here")
    matrix = torch.randn(6 * BLOCK, KV_HEADS * DIM, generator=torch.Generator().manual_seed(0))
    for lengths in ((6, 7), (2, 9)):
        contexts = [list(range(2 * BLOCK * i, 2 * BLOCK * i + length)) for i, length in enumerate(lengths, 1)]
        plain = attend(matrix, contexts, compiled=False)
        torch.testing.assert_close(attend(matrix, contexts, compiled=True), plain)
