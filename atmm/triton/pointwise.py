"""Launches of the kernels that replace several eager operations of a layer each; see `atmm.pointwise`."""

from __future__ import annotations

import torch
from torch import Tensor

from atmm.triton.handles import handle

_BLOCK = 1024  # values of a row that one program computes
ROTATED = 8  # heads that one program rotates: a warp then reads 128 bits per thread


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    width = x.shape[-1]
    heads = x.shape[-2] if x.dim() == 4 else 1  # of queries or keys, which may be a part of wider rows
    rows = x.reshape(-1, heads, width)
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = _power_of_two(width)
    sizes = ("HEADS", heads), ("BLOCK", block)
    kernel = handle("normalize", x.dtype, x.device, sizes, num_warps=min(8, max(1, block // 512)))
    if len(rows):
        strides = rows.stride(0), rows.stride(1) if heads > 1 else 0
        kernel((len(rows) * heads, 1, 1), (out, rows, weight), (width, *strides), epsilon)
    return out


def gate_product(gate: Tensor, up: Tensor) -> Tensor:
    width = gate.shape[-1]
    gates, ups = _rows(gate), _rows(up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    kernel = handle("gate_product", gate.dtype, gate.device, (("BLOCK", _BLOCK),))
    if len(gates):
        programs = len(gates), -(-width // _BLOCK), 1
        kernel(programs, (out, gates, ups), (width, gates.stride(0), ups.stride(0)))
    return out


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    heads, num_tokens, head_dim = q.shape
    sizes = ("HEADS", heads), ("KV_HEADS", len(k)), ("ROWS", ROTATED), ("HALF", head_dim // 2)
    kernel = handle("rotate", q.dtype, q.device, sizes, num_warps=1)
    strides = q.stride(1), q.stride(0), k.stride(1), k.stride(0), cos.stride(0)
    kernel((num_tokens, -(-heads // ROTATED) + -(-len(k) // ROTATED), 1), (q, k, cos, sin), strides)


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> None:
    num_tokens, width = k.shape
    kernel = handle("write_kv", k.dtype, k.device, (("BLOCK", _BLOCK),))
    strides = k_cache.stride(0), k.stride(0), v.stride(0)
    kernel((num_tokens, -(-width // _BLOCK), 1), (k_cache, v_cache, k, v), (width, *strides), rows)


def quantize_rows(values: Tensor, scales: Tensor, x: Tensor, largest: float) -> None:
    num_rows, width = x.shape
    rows = _rows(x)
    block = _power_of_two(width)
    kernel = handle("quantize_rows", x.dtype, x.device, (("BLOCK", block),), num_warps=min(16, max(1, block // 512)))
    if num_rows:
        kernel((num_rows, 1, 1), (values, scales, rows), (width, rows.stride(0)), largest)


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
