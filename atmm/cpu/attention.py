"""Attention of single tokens over paged KV by the compiled kernel, which reads the cache in place."""

from __future__ import annotations

import torch
from torch import Tensor

from atmm.cpu import library


def serves_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel exists for this device and type."""
    kernels = library() if device.type == "cpu" else None
    return kernels is not None and dtype in kernels.attend


def attend(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, places: Tensor, rows: Tensor, starts: Tensor, scale: float
) -> None:
    """Write softmax(scale * q k^T) v of some queries into `out`. Requires `serves_attention`.

    Query heads share KV heads in order, as in grouped-query attention. Scores, softmax and sums are in float32.

    Args:
        out: [T, heads, head_dim], contiguous; rows that are not in `places` are not modified.
        q: [T, heads, head_dim], any strides.
        k, v: the cache, [cache rows, kv_heads * head_dim], values of a row adjacent; equal row strides.
        places: int64 [D], rows of `q` and `out`.
        rows: int64 [sum of context lengths], cache rows, one context after the other.
        starts: int64 [D + 1], the offset of each context in `rows`, and their end; no context is empty.
        scale: factor of the scores.

    Raises:
        ValueError: if shapes, types or layouts do not match, before anything is written. Indices are not checked.
    """
    _, heads, head_dim = q.shape
    num_queries = places.numel()  # len(places) is slow
    kv_heads, rest = divmod(k.shape[1], head_dim)
    problem = None
    if rest or kv_heads == 0 or heads % kv_heads:
        problem = f"a cache row of {k.shape[1]} values does not fit {heads} query heads of {head_dim}"
    elif out.shape != q.shape or not out.is_contiguous():
        problem = f"out is {tuple(out.shape)} with strides {out.stride()}; expected contiguous {tuple(q.shape)}"
    elif k.shape[1] != v.shape[1] or k.stride() != v.stride() or k.stride(1) != 1:
        problem = f"k has strides {k.stride()}, v {v.stride()}; expected rows of one width and stride, values adjacent"
    elif not out.dtype == q.dtype == k.dtype == v.dtype:
        problem = f"types differ: out {out.dtype}, q {q.dtype}, k {k.dtype}, v {v.dtype}"
    elif starts.numel() != num_queries + 1 or not places.dtype == rows.dtype == starts.dtype == torch.int64:
        problem = f"{num_queries} int64 places need {num_queries + 1} int64 starts, got {len(starts)} ({starts.dtype})"
    if problem is not None:
        raise ValueError(problem)
    kernels = library()
    assert kernels is not None, "the compiled kernels are not available"
    kernels.attend[q.dtype](
        out.data_ptr(), q.data_ptr(), *q.stride(), k.data_ptr(), v.data_ptr(), k.stride(0), places.data_ptr(),
        rows.data_ptr(), starts.data_ptr(), num_queries, heads, kv_heads, head_dim, scale,
    )  # fmt: skip
