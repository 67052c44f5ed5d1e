"""Torch's flash kernel for packed sequences (`torch.nn.attention.varlen`), which exists for CUDA only, on the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch


def varlen_attention(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Attention within sequences, causal at the bottom right. The other outputs, used in training, are empty.

    Args:
        schema: Of the operator `torch_attn::_varlen_attn`, which differs between versions of torch.
        args: Positional arguments, with tensors on the CPU.
        kwargs: Keyword arguments.
    """
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    causal = given["is_causal"]
    whole = given.get("window_size") in (None, [-1, 0 if causal else -1])
    if not whole or given.get("seqused_k") is not None or given.get("block_table") is not None:
        raise NotImplementedError("the simulated device has no windows and no pages in varlen_attn")
    query, key, value = given["query"], given["key"], given["value"]
    group = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    starts = (itertools.pairwise(given[name].tolist()) for name in ("cu_seq_q", "cu_seq_k"))
    for (first_q, stop_q), (first_k, stop_k) in zip(*starts, strict=True):
        q = query[first_q:stop_q].transpose(0, 1)
        k, v = (part[first_k:stop_k].transpose(0, 1).repeat_interleave(group, 0) for part in (key, value))
        places = torch.arange(stop_q - first_q)[:, None] + (stop_k - first_k) - (stop_q - first_q)
        mask = places >= torch.arange(stop_k - first_k) if causal else None
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=given["scale"])
        out[first_q:stop_q] = attended.transpose(0, 1)
    return out, torch.empty(query.shape[1], len(query)), torch.empty(2, dtype=torch.uint64)
