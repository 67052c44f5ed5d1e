"""Attention of packed sequences by the flash kernel that is part of torch (`torch.nn.attention.varlen`, since 2.11).

The kernel exists for CUDA only. Tests replace `kernel` by an implementation for CPUs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MOST_HEAD_DIM = 256
_FULL, _CAUSAL = (-1, -1), (-1, 0)  # torch's window sizes, left and right


@functools.cache
def kernel() -> Callable[..., Any]:
    """torch's function. Its module takes more than a second to import, so that it is imported on a GPU only."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def serves_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel exists for this device, type and head dimension, on compute capability 8.0 or later.

    If so, it is imported, so that no step has to wait for that.
    """
    known = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= _MOST_HEAD_DIM
    serves = known and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if serves:
        kernel()
    return serves


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """softmax(scale * q k^T) v within each of several sequences. Requires `serves_flash`.

    Query heads share KV heads in order, as in grouped-query attention. With `causal`, the last query of a sequence
    attends all its keys, the query before it all but the last one, and so on (aligned at the bottom right), so that a
    sequence must have at least as many keys as queries.

    Args:
        q: [sum of query counts, heads, head_dim], values of a head adjacent.
        k: [sum of key counts, kv_heads, head_dim], values of a head adjacent.
        v: like `k`.
        starts_q: int32 [sequences + 1], the offset of each sequence in `q`, and their end; on the device of `q`.
        starts_k: int32 [sequences + 1], the offset of each sequence in `k` and `v`, and their end.
        longest_q: The largest number of queries of a sequence.
        longest_k: The largest number of keys of a sequence.
        causal: Whether queries attend earlier keys only.

    Returns:
        [sum of query counts, heads, head_dim], contiguous.
    """
    options: dict[str, Any] = {"scale": scale, "window_size": _CAUSAL if causal else _FULL}
    attend = kernel()
    if q.shape[1] != k.shape[1] and _takes_enable_gqa(attend):
        options["enable_gqa"] = True
    out: Tensor = attend(q, k, v, starts_q, starts_k, longest_q, longest_k, **options)
    return out


@functools.cache
def _takes_enable_gqa(function: Callable[..., object]) -> bool:
    """torch 2.11 shares KV heads without this argument; torch 2.13 raises an error without it."""
    return "enable_gqa" in inspect.signature(function).parameters
