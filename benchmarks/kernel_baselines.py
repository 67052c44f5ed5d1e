"""GPU kernels that tile the same work as other servers do, as baselines of `vlora bench atmm`.

bgmv      Punica (section 4.1), S-LoRA's MBGMV: a program per token and rank row, then per token and block of outputs;
          no work is shared between tokens of one adapter. Two launches per site.
sgmv      Punica (section 4.1): a program processes all tokens of its segment; outputs in fixed tiles of 32 x 128. Two
          launches per site.
mbgmm     S-LoRA (section 5.3): tiles of 32 tokens, every segment padded to the longest. Two launches per site.
vllm      sums split 64 ways (8 from 128 tokens) and added by atomics to cleared memory; a grid for the maximum number
          of adapters, mostly empty; all sites of a group in one launch. Three launches per group.
sglang    segments in chunks of 16, 32 or 128 tokens, sums not split, small blocks of outputs. Two launches per group.

All read this project's layout, in which every load of a factor is 128 bits wide: this favours some of the baselines.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from atmm import Lane, SiteGroup


@triton.jit
def _shrink(
    x_ptr, hidden_ptr, table_ptr, d_in, x_stride, a_stride, hidden_stride,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, ATOMIC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (rows of the table, rank blocks, SPLIT_K). A row is int64 [first token, tokens, rank, address of A, column
    of hidden].
    """
    row = table_ptr + tl.program_id(0) * 5
    first_token = tl.load(row)
    count = tl.load(row + 1)
    rank = tl.load(row + 2)
    first_rank = tl.program_id(1) * BLOCK_R
    if count == 0 or first_rank >= rank:
        return
    a_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    column = tl.load(row + 4)
    m = tl.arange(0, BLOCK_M)
    r = first_rank + tl.arange(0, BLOCK_R)
    k = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    for first in range(0, count, BLOCK_M):
        token = first_token + first + m
        in_tile = first + m < count
        sums = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for start in range(0, d_in, BLOCK_K * SPLIT_K):
            in_sum = start + k < d_in
            x = tl.load(
                x_ptr + token[:, None] * x_stride + (start + k)[None, :],
                mask=in_tile[:, None] & in_sum[None, :],
                other=0.0,
            )
            a = tl.load(
                a_ptr + r[None, :] * a_stride + (start + k)[:, None],
                mask=(r < rank)[None, :] & in_sum[:, None],
                other=0.0,
            )
            sums = tl.dot(x, a, sums, input_precision=PRECISION)
        to = hidden_ptr + token[:, None] * hidden_stride + column + r[None, :]
        if ATOMIC:
            tl.atomic_add(to, sums, mask=in_tile[:, None], sem="relaxed")
        else:
            tl.store(to, sums, mask=in_tile[:, None])


@triton.jit
def _expand(
    hidden_ptr, y_like_ptr, table_ptr, hidden_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, MAX_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (rows of the table, maximum blocks of outputs). A row is int64 [first token, tokens, rank, column of
    hidden, address of Bt, its stride, address of y, its stride, outputs].
    """
    row = table_ptr + tl.program_id(0) * 9
    first_token = tl.load(row)
    count = tl.load(row + 1)
    rank = tl.load(row + 2)
    column = tl.load(row + 3)
    bt_ptr = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(y_like_ptr.dtype.element_ty)), 16)
    bt_stride = tl.multiple_of(tl.load(row + 5), 8)
    y_ptr = tl.multiple_of(tl.load(row + 6).to(tl.pointer_type(y_like_ptr.dtype.element_ty)), 16)
    y_stride = tl.multiple_of(tl.load(row + 7), 8)
    d_out = tl.load(row + 8)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if count == 0 or tl.program_id(1) * BLOCK_N >= d_out:
        return
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    for first in range(0, count, BLOCK_M):
        token = first_token + first + m
        in_tile = first + m < count
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first_rank in tl.static_range(0, MAX_RANK, BLOCK_R):
            in_rank = first_rank + r < rank
            hidden = tl.load(
                hidden_ptr + token[:, None] * hidden_stride + column + (first_rank + r)[None, :],
                mask=in_tile[:, None] & in_rank[None, :],
                other=0.0,
            )
            bt = tl.load(
                bt_ptr + (first_rank + r)[:, None] * bt_stride + n[None, :],
                mask=in_rank[:, None] & (n < d_out)[None, :],
                other=0.0,
            )
            sums = tl.dot(hidden.to(bt.dtype), bt, sums, input_precision=PRECISION)
        at = y_ptr + token[:, None] * y_stride + n[None, :]
        mask = in_tile[:, None] & (n < d_out)[None, :]
        y = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, (y + sums).to(y_like_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _token_shrink(
    x_ptr, hidden_ptr, table_ptr, d_in, x_stride, a_stride, hidden_stride, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, maximum ranks); the table of `_shrink`, a row per token."""
    row = table_ptr + tl.program_id(0) * 5
    r = tl.program_id(1)
    if r >= tl.load(row + 2):
        return
    token = tl.load(row)
    a_ptr = tl.load(row + 3).to(tl.pointer_type(x_ptr.dtype.element_ty)) + r * a_stride
    k = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for start in range(0, d_in, BLOCK_K):
        mask = start + k < d_in
        x = tl.load(x_ptr + token * x_stride + start + k, mask=mask, other=0.0).to(tl.float32)
        sums += x * tl.load(a_ptr + start + k, mask=mask, other=0.0).to(tl.float32)
    tl.store(hidden_ptr + token * hidden_stride + tl.load(row + 4) + r, tl.sum(sums))


@triton.jit
def _token_expand(hidden_ptr, y_like_ptr, table_ptr, hidden_stride, BLOCK_N: tl.constexpr):
    """Grid (tokens, maximum blocks of outputs); the table of `_expand`, a row per token."""
    row = table_ptr + tl.program_id(0) * 9
    d_out = tl.load(row + 8)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if tl.program_id(1) * BLOCK_N >= d_out:
        return
    token = tl.load(row)
    rank = tl.load(row + 2)
    hidden_ptr += token * hidden_stride + tl.load(row + 3)
    bt_ptr = tl.load(row + 4).to(tl.pointer_type(y_like_ptr.dtype.element_ty))
    at = tl.load(row + 6).to(tl.pointer_type(y_like_ptr.dtype.element_ty)) + token * tl.load(row + 7) + n
    sums = tl.load(at, mask=n < d_out, other=0.0).to(tl.float32)
    for r in range(0, rank):
        bt = tl.load(bt_ptr + r * tl.load(row + 5) + n, mask=n < d_out, other=0.0)
        sums += tl.load(hidden_ptr + r) * bt.to(tl.float32)
    tl.store(at, sums.to(y_like_ptr.dtype.element_ty), mask=n < d_out)


class _Chunk(NamedTuple):
    key: str | None  # None: no work
    start: int
    num_tokens: int


class _Style(NamedTuple):
    """How a system divides the work."""

    chunks: Callable[[Sequence[Lane]], list[_Chunk]]  # the range of each row of a table
    block_m: int  # tokens of a tile
    block_n: int  # outputs of a tile
    block_k: int  # inputs of a tile
    split_k: int = 1  # parts into which the inputs of a shrink are split
    together: bool = False  # all sites of a group in one launch


MOST_ADAPTERS = 64  # number of slots in the grid of a vLLM-style launch


def _tokens(lanes: Sequence[Lane]) -> list[_Chunk]:
    return [_Chunk(lane.key, token, 1) for lane in lanes for token in range(lane.start, lane.stop)]


def _segments(lanes: Sequence[Lane]) -> list[_Chunk]:
    return [_Chunk(lane.key, lane.start, lane.stop - lane.start) for lane in lanes]


def _chunks_of(size: int) -> Callable[[Sequence[Lane]], list[_Chunk]]:
    def chunks(lanes: Sequence[Lane]) -> list[_Chunk]:
        return [
            _Chunk(lane.key, token, min(size, lane.stop - token))
            for lane in lanes
            for token in range(lane.start, lane.stop, size)
        ]

    return chunks


def _padded(lanes: Sequence[Lane]) -> list[_Chunk]:
    longest = max(lane.stop - lane.start for lane in lanes)
    return [
        _Chunk(lane.key, lane.start + first, max(0, min(32, lane.stop - lane.start - first)))
        for lane in lanes
        for first in range(0, longest, 32)
    ]


def _slots(size: int) -> Callable[[Sequence[Lane]], list[_Chunk]]:
    """Chunks, padded with empty ones as if every slot could hold all tokens."""

    def chunks(lanes: Sequence[Lane]) -> list[_Chunk]:
        total = sum(lane.stop - lane.start for lane in lanes)
        full = _chunks_of(size)(lanes)
        return full + [_Chunk(None, 0, 0)] * max(0, -(-total // size) * MOST_ADAPTERS - len(full))

    return chunks


STYLES = ("bgmv", "sgmv", "mbgmm", "vllm", "sglang")


def _style(name: str, num_tokens: int) -> _Style:
    if name == "bgmv":
        return _Style(_tokens, 1, 128, 256)
    if name == "sgmv":
        return _Style(_segments, 32, 128, 64)
    if name == "mbgmm":
        return _Style(_padded, 32, 128, 128)
    if name == "vllm":
        few = num_tokens < 128
        return _Style(_slots(32), 32, 64 if few else 128, 256 if few else 32, 64 if few else 8, together=True)
    chunk = 16 if num_tokens <= 64 else 32 if num_tokens <= 512 else 128
    return _Style(_chunks_of(chunk), chunk, 64, 256 if chunk < 128 else 128, together=True)


def prepare_call(
    name: str, group: SiteGroup, lanes: Sequence[Lane], x: Tensor, outputs: Sequence[Tensor]
) -> Callable[[], None]:
    """A call that adds the lanes' deltas of all sites to `outputs` in this style. Tables are built in advance, because
    all styles build them once per step. Lanes must not overlap, and all of the group's adapters must be packed.
    """
    packed = group.packed
    assert packed is not None
    layout = packed.layout
    style = _style(name, x.shape[0])
    chunks = style.chunks(lanes)
    highest = max(span.rank for site in layout.spans for span in site.values())
    width = -(-highest // _block_r(highest)) * _block_r(highest)
    shrinks: list[list[tuple[int, ...]]] = []
    expands: list[list[tuple[int, ...]]] = []
    for site in group.sites:
        spans, bt, y = layout.spans[site.index], packed.bts[site.index], outputs[site.index]
        column = site.index * width
        shrink: list[tuple[int, ...]] = []
        expand: list[tuple[int, ...]] = []
        for key, start, num_tokens in chunks:
            span = spans.get(key) if key is not None else None
            if span is None:
                shrink.append((0, 0, 0, packed.a.data_ptr(), 0))
                expand.append((0, 0, 0, 0, bt.data_ptr(), bt.stride(0), y.data_ptr(), y.stride(0), 0))
                continue
            row = layout.first_rows[site.index] + span.start
            shrink.append((start, num_tokens, span.rank, _address(packed.a, row), column))
            own = start, num_tokens, span.rank, column, _address(bt, span.start), bt.stride(0)
            expand.append((*own, y.data_ptr(), y.stride(0), site.d_out))
        shrinks.append(shrink)
        expands.append(expand)
    if style.together:
        shrinks, expands = [list(itertools.chain(*shrinks))], [list(itertools.chain(*expands))]
    hidden = torch.zeros(x.shape[0], len(group.sites) * width, dtype=torch.float32, device=x.device)
    device_tables = [
        (torch.tensor(shrink, device=x.device), torch.tensor(expand, device=x.device), max(row[8] for row in expand))
        for shrink, expand in zip(shrinks, expands, strict=True)
    ]
    launch = _by_token if name == "bgmv" else _by_tile
    return lambda: launch(style, x, outputs[0], packed.a, hidden, width, device_tables)


def _block_r(rank: int) -> int:
    return min(64, max(16, triton.next_power_of_2(rank)))


def _address(tensor: Tensor, row: int) -> int:
    return tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()


def _by_tile(
    style: _Style, x: Tensor, y: Tensor, a: Tensor, hidden: Tensor, width: int, tables: Sequence[tuple[Any, ...]]
) -> None:
    block_r = _block_r(width)
    rank_blocks = width // block_r
    atomic = style.split_k > 1
    if atomic:
        hidden.zero_()
    for shrink, expand, d_out in tables:
        _shrink[(len(shrink), rank_blocks, style.split_k)](
            x, hidden, shrink, x.shape[1], x.stride(0), a.stride(0), hidden.stride(0),
            BLOCK_M=max(16, style.block_m), BLOCK_R=block_r, BLOCK_K=style.block_k, SPLIT_K=style.split_k,
            ATOMIC=atomic, PRECISION="ieee",
        )  # fmt: skip
        _expand[(len(expand), -(-d_out // style.block_n))](
            hidden, y, expand, hidden.stride(0),
            BLOCK_M=max(16, style.block_m), BLOCK_N=style.block_n, BLOCK_R=block_r, MAX_RANK=rank_blocks * block_r,
            PRECISION="ieee",
        )  # fmt: skip


def _by_token(
    style: _Style, x: Tensor, y: Tensor, a: Tensor, hidden: Tensor, width: int, tables: Sequence[tuple[Any, ...]]
) -> None:
    for shrink, expand, d_out in tables:
        _token_shrink[(len(shrink), width)](
            x, hidden, shrink, x.shape[1], x.stride(0), a.stride(0), hidden.stride(0), BLOCK_K=style.block_k
        )
        _token_expand[(len(expand), -(-d_out // style.block_n))](
            hidden, y, expand, hidden.stride(0), BLOCK_N=style.block_n
        )
