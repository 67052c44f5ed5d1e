"""Attention over paged KV by the compiled kernels, which read the cache in place: of single tokens, and of chunks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from atmm.cpu import library
from atmm.processor import flags


def serves_attention(device: torch.device, dtype: torch.dtype) -> bool:
    kernels = library() if device.type == "cpu" else None
    return kernels is not None and dtype in kernels.attend


def attends_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `attend_all` is faster than torch's attention, which it is not in float32 without AVX-512."""
    return serves_attention(device, dtype) and (dtype is torch.bfloat16 or "avx512f" in flags())


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

    Raises:
        ValueError: if shapes, types or layouts do not match, before anything is written. Indices are not checked.
    """
    if starts.numel() != places.numel() + 1:  # len(places) is slow
        raise ValueError(f"{places.numel()} places need {places.numel() + 1} starts, got {starts.numel()}")
    _run("attend", out, q, k, v, places, rows, starts, scale)


def attend_chunk(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, places: Tensor, rows: Tensor, seen: Tensor, scale: float
) -> None:
    """As `attend`, for tokens of one context: each sees its first tokens, up to itself. Requires `serves_attention`.

    A token's result does not depend on the others of the chunk.

    Args:
        out: [T, heads, head_dim], contiguous; rows that are not in `places` are not modified.
        q: [T, heads, head_dim], any strides.
        k, v: as `attend`.
        places: int64 [n], rows of `q` and `out`.
        rows: int64 [context], its cache rows.
        seen: int64 [n], the numbers of tokens of the context that each one sees, ascending, at least 1.

    Raises:
        ValueError: as `attend`.
    """
    if seen.numel() != places.numel():
        raise ValueError(f"{places.numel()} places need as many numbers of seen tokens, got {seen.numel()}")
    _run("attend_chunk", out, q, k, v, places, rows, seen, scale)


def attend_all(out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, count: int) -> Iterator[int]:
    """Attention of every token to all tokens, of some tokens in each iteration. Requires `serves_attention`.

    Args:
        out: [batch, tokens, heads, head_dim], contiguous.
        q: [batch, heads, tokens, head_dim], any strides; k and v likewise, of other tokens if need be.
        count: Tokens of an iteration.

    Yields:
        The number of tokens whose results were written.
    """
    rows, seen = torch.arange(k.shape[2]), torch.full((q.shape[2],), k.shape[2])
    for own, queries, *sides in zip(out, *(side.transpose(1, 2) for side in (q, k, v)), strict=True):
        keys, values = (side.flatten(1) for side in sides)
        if keys.stride() != values.stride() or keys.stride(1) != 1:
            keys, values = keys.contiguous(), values.contiguous()
        for places in torch.arange(len(queries)).split(count):
            attend_chunk(own, queries, keys, values, places, rows, seen[: len(places)], scale)
            yield len(places)


def _run(
    name: str, out: Tensor, q: Tensor, k: Tensor, v: Tensor, places: Tensor, rows: Tensor, bounds: Tensor, scale: float
) -> None:
    """Call the kernel if shapes, types and layouts match. Raises ValueError if not."""
    _, heads, head_dim = q.shape
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
    elif not places.dtype == rows.dtype == bounds.dtype == torch.int64:
        problem = f"indices are {places.dtype}, {rows.dtype} and {bounds.dtype}; expected int64"
    if problem is not None:
        raise ValueError(problem)
    kernels = library()
    assert kernels is not None, "the compiled kernels are not available"
    getattr(kernels, name)[q.dtype](
        out.data_ptr(), q.data_ptr(), *q.stride(), k.data_ptr(), v.data_ptr(), k.stride(0), places.data_ptr(),
        rows.data_ptr(), bounds.data_ptr(), places.numel(), heads, kv_heads, head_dim, scale,
    )  # fmt: skip
