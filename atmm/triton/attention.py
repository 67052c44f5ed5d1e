"""Decode attention on a GPU over paged KV, read in place: no row is gathered and no context is padded.

Every program attends over an equal share of the tiles of all contexts, whatever their lengths, and a second kernel
combines the parts of contexts that lie in several shares. The programs compute their shares from the lengths on the
device, so that a captured graph is valid for contexts of any length.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from atmm.triton.handles import handle, multiprocessors

_PROGRAMS = 2  # for each multiprocessor
_FEWEST = 8  # requests
_HEAD_DIMS = (16, 32, 64, 128)
GROUP_ROWS = 16  # of a product with the query heads of a group, the fewest that tensor cores take
_LOG2_E = math.log2(math.e)
JOIN_WARPS, JOIN_PARTS = 1, 16  # one warp, so that the programs of a join need no barrier
# float32 products stay in float32: TF32 on tensor cores would change answers.
_PRECISION = "ieee"


class Scratch(NamedTuple):
    """Space for the parts of contexts in several shares, float32; it may be shared by all layers of a step.

    parts: [2 * shares, kv_heads, group, head_dim]. stats: [2 * shares, kv_heads, 2, group], the largest score and the
    sum of weights.
    """

    parts: Tensor
    stats: Tensor


class Tile(NamedTuple):
    """tokens: of the context that a program reads at a time. stages: of its pipeline."""

    tokens: int
    stages: int


def tile_of(itemsize: int, block_size: int) -> Tile:
    """The tile for values of this many bytes. A tile is whole blocks; wider float32 tiles spill registers."""
    tokens, stages = (16, 2) if itemsize == 4 else (64, 3)
    return Tile(max(tokens, block_size), stages)


def serves_decode(dtype: torch.dtype, group: int, head_dim: int, block_size: int) -> bool:
    """Whether the kernels exist for this type and these sizes. group: query heads per KV head."""
    whole = 0 < block_size <= 64 and block_size & (block_size - 1) == 0
    known = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return known and 0 < group <= GROUP_ROWS and head_dim in _HEAD_DIMS and whole


def num_shares(kv_heads: int, device: torch.device) -> int:
    """The number of shares of all contexts of a batch, such that all KV heads together fill the GPU."""
    return max(1, _PROGRAMS * multiprocessors(device) // kv_heads)


def padded_batch(batch: int) -> int:
    """The number of requests for which kernels are compiled that serve this batch."""
    return max(_FEWEST, 1 << (batch - 1).bit_length())


def make_scratch(heads: int, kv_heads: int, head_dim: int, device: torch.device) -> Scratch:
    """Uninitialized space for `decode` with these sizes, of batches of any size."""
    shape = 2 * num_shares(kv_heads, device), kv_heads
    group = heads // kv_heads
    parts = torch.empty(*shape, group, head_dim, dtype=torch.float32, device=device)
    return Scratch(parts, torch.empty(*shape, 2, group, dtype=torch.float32, device=device))


def decode(
    q: Tensor,
    kv_rows: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    block_rows: int,
    block_size: int,
    scale: float,
    places: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v of one query per request over its paged context. Requires `serves_decode`.

    Query heads share KV heads in order, as in grouped-query attention. Scores, softmax and sums are in float32. Two
    launches. A padding row of a batch is a request of length 1 with any block.

    Args:
        q: [T, heads, head_dim], values of a head adjacent.
        kv_rows: [rows, kv_heads * head_dim], values of a row adjacent: the KV matrix from the first key row of a layer
            on. Token t of a context is in block b = block_table[request, t // block_size]: its key is row
            b * block_rows + t % block_size, and its value lies block_size rows behind.
        block_table: int32 [batch, most blocks], entries adjacent; entries past a context are not read.
        lengths: int32 [batch], context lengths in tokens, at least 1 each.
        places: int32 [batch], rows of `q` and `out`; default: 0 to batch - 1.
        out: [T, heads, head_dim], contiguous; rows that are not in `places` are not modified. Default: a new tensor.
        scratch: From `make_scratch` for these heads; default: new for this call.

    Returns:
        `out`.

    Raises:
        ValueError: If shapes, types or layouts do not match, before anything is launched. Values of `block_table`,
            `lengths` and `places` are not checked.
    """
    batch = len(lengths)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if places is None:
        places = torch.arange(batch, dtype=torch.int32, device=q.device)
    _check(q, kv_rows, block_table, lengths, places, out, block_size)
    _, heads, head_dim = q.shape
    kv_heads = kv_rows.shape[1] // head_dim
    group, shares = heads // kv_heads, num_shares(kv_heads, q.device)
    if scratch is None:
        scratch = make_scratch(heads, kv_heads, head_dim, q.device)
    elif scratch.parts.shape != (2 * shares, kv_heads, group, head_dim):
        raise ValueError(f"the scratch is {tuple(scratch.parts.shape)}; make it for these heads, in {shares} shares")
    tile = tile_of(q.dtype.itemsize, block_size)
    common = ("GROUP", group), ("HEAD", head_dim), ("KV_HEADS", kv_heads), ("TILE", tile.tokens)
    sizes = *common, ("BATCH", padded_batch(batch))
    more = ("PAD", GROUP_ROWS), ("BLOCK", block_size), ("PRECISION", _PRECISION)
    kernel = handle("decode_part", q.dtype, q.device, (*sizes, *more), num_stages=tile.stages)
    strides = out.stride(0), q.stride(0), q.stride(1), block_rows, kv_rows.stride(0), block_table.stride(0)
    kernel(
        (shares, kv_heads, 1),
        (out, *scratch, q, kv_rows),
        strides,
        *(places, lengths, block_table, batch, scale * _LOG2_E),
    )
    join = handle("decode_join", q.dtype, q.device, (*sizes, ("PARTS", JOIN_PARTS)), num_warps=JOIN_WARPS)
    join((batch, heads, 1), (out, *scratch), (out.stride(0),), places, lengths, batch, shares)
    return out


def _check(
    q: Tensor, kv_rows: Tensor, block_table: Tensor, lengths: Tensor, places: Tensor, out: Tensor, block_size: int
) -> None:
    _, heads, head_dim = q.shape
    kv_heads, rest = divmod(kv_rows.shape[1], head_dim)
    problem = None
    if rest or kv_heads == 0 or heads % kv_heads:
        problem = f"a cache row of {kv_rows.shape[1]} values does not fit {heads} query heads of {head_dim}"
    elif not serves_decode(q.dtype, heads // kv_heads, head_dim, block_size):
        problem = (
            f"no kernel for {q.dtype}, {heads // kv_heads} query heads of {head_dim} per KV head and blocks of "
            f"{block_size} tokens"
        )
    elif out.shape != q.shape or not out.is_contiguous():
        problem = f"out is {tuple(out.shape)} with strides {out.stride()}; expected contiguous {tuple(q.shape)}"
    elif q.stride(2) != 1 or kv_rows.stride(1) != 1 or block_table.stride(1) != 1:
        problem = "values of a head, of a cache row and entries of a block table must be adjacent"
    elif not q.dtype == kv_rows.dtype == out.dtype:
        problem = f"types differ: out {out.dtype}, q {q.dtype}, kv_rows {kv_rows.dtype}"
    elif len(block_table) != len(lengths) or len(places) != len(lengths) or len(lengths) == 0:
        problem = f"{len(block_table)} block tables and {len(places)} places for {len(lengths)} lengths"
    elif any(tensor.dtype != torch.int32 for tensor in (block_table, lengths, places)):
        problem = f"expected int32, got {block_table.dtype}, {lengths.dtype}, {places.dtype}"
    if problem is not None:
        raise ValueError(problem)
