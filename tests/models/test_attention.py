"""Decoding over paged KV: what a request may not see cannot touch it."""

from __future__ import annotations

import math

import pytest
import torch

from vlora.models.attention import KVCache, StepAttention, decode_rows, paged_attention

HEADS, KV_HEADS, DIM = 4, 2, 8
CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    layer_idx = 0


def attend(caches: tuple[torch.Tensor, torch.Tensor], contexts: list[list[int]]) -> torch.Tensor:
    """One new token for each context, whose last row is the new token's own; [requests, heads, dim]."""
    generator = torch.Generator().manual_seed(1)
    num = len(contexts)
    query = torch.randn(1, HEADS, num, DIM, generator=generator)
    key, value = (torch.randn(1, KV_HEADS, num, DIM, generator=generator) for _ in range(2))
    step = StepAttention(
        KVCache(*(cache.clone()[None] for cache in caches)),
        torch.tensor([rows[-1] for rows in contexts]),
        (),
        decode_rows(None, [torch.tensor(rows) for rows in contexts], CPU),
    )
    out, _ = paged_attention(Layer(), query, key, value, None, vlora_step=step)
    return out[0]


@pytest.mark.parametrize("lengths", ((3, 4), (2, 9)), ids=("padded", "ragged"))
def test_what_is_not_a_number_in_anothers_kv_stays_there(lengths: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(64, KV_HEADS * DIM, generator=generator)
    contexts = [list(range(20, 20 + lengths[0])), list(range(40, 40 + lengths[1]))]
    alone = [attend((cache, cache), contexts)]
    poisoned = torch.full_like(cache, math.nan)
    for rows in contexts:
        poisoned[rows] = cache[rows]
    alone.append(attend((poisoned, poisoned), contexts))
    assert torch.equal(*alone) and alone[0].isfinite().all()
