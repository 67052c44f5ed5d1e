"""`torch.nn.attention.varlen.varlen_attn` on a CPU in float64, with the signatures of torch 2.11 and of torch 2.13."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def varlen_attn_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Attention within each sequence. Fails where the CUDA kernel fails, or where it reads past a sequence."""
    for tensor in (query, key, value):
        assert tensor.stride(-1) == 1, "the kernel needs adjacent values of a head"
        assert tensor.dtype == query.dtype
    assert window_size in ((-1, -1), (-1, 0))
    for starts, longest, length in ((cu_seq_q, max_q, len(query)), (cu_seq_k, max_k, len(key))):
        assert starts.dtype == torch.int32 and starts.is_contiguous()
        assert starts[0] == 0 and starts[-1] == length
        assert longest == int(starts.diff().max()) and int(starts.diff().min()) > 0
    assert len(cu_seq_q) == len(cu_seq_k) and len(key) == len(value)
    group, rest = divmod(query.shape[1], key.shape[1])
    assert rest == 0
    out = torch.empty(query.shape, dtype=query.dtype)
    for first_q, stop_q, first_k, stop_k in zip(
        cu_seq_q.tolist(), cu_seq_q[1:].tolist(), cu_seq_k.tolist(), cu_seq_k[1:].tolist(), strict=False
    ):
        num_q, num_k = stop_q - first_q, stop_k - first_k
        keys, values = (
            side[first_k:stop_k].double().repeat_interleave(group, 1).transpose(0, 1) for side in (key, value)
        )
        scores = query[first_q:stop_q].double().transpose(0, 1) @ keys.transpose(1, 2)
        scores *= query.shape[2] ** -0.5 if scale is None else scale
        if window_size == (-1, 0):
            assert num_k >= num_q, "the first queries would attend nothing"
            hidden = torch.ones(num_q, num_k, dtype=torch.bool).triu(num_k - num_q + 1)
            scores.masked_fill_(hidden, -math.inf)
        out[first_q:stop_q] = (scores.softmax(2) @ values).transpose(0, 1).to(out.dtype)
    return out


def varlen_attn_2_13(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Like `varlen_attn_2_11`, but KV heads are shared on request only."""
    assert seqused_k is None and block_table is None and num_splits is None and cu_seq_k is not None
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"expected equal numbers of heads, got {query.shape[1]} and {key.shape[1]}")
    return varlen_attn_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


VERSIONS = {"2.11": varlen_attn_2_11, "2.13": varlen_attn_2_13}
