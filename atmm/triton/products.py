"""Products with weights of four and eight bits, restored in registers: the launches of `multiply_integers`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atmm.quantized import Integers
from atmm.triton.handles import handle, multiprocessors

_MOST_SPLITS = 8
_JOINED = 1024  # outputs that one program joins


class ProductTile(NamedTuple):
    """block_m: tokens. block_n: outputs. block_k: inputs that are multiplied at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def product_tile(num_tokens: int, itemsize: int) -> ProductTile:
    """The tile for inputs of this many bytes. It fits into 99 KB of shared memory."""
    if itemsize == 4:  # products in float32 have their operands in registers
        return ProductTile(16, 64, 32, 4, 2)
    for block_m, block_k, num_stages in ((16, 128, 4), (32, 128, 3), (64, 64, 3)):
        if num_tokens <= block_m:
            return ProductTile(block_m, 64, block_k, 4, num_stages)
    return ProductTile(128, 128, 64, 8, 2)


def num_splits(num_programs: int, num_blocks: int, device: torch.device) -> int:
    """Programs that share one sum. num_blocks: of inputs."""
    splits = 1
    wanted = 2 * multiprocessors(device)
    while num_programs * splits < wanted and splits < _MOST_SPLITS and num_blocks >= 4 * splits:
        splits *= 2
    return splits


def multiply(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, kind: Integers) -> Tensor:
    """x [T, d_in] times the weights [d_out, d_in] transposed, plus bias: [T, d_out], contiguous, of x's type.

    Weights are rounded to x's type, and inputs are not rounded. Sums are in float32.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tokens, d_in = x.shape
    d_out = len(values)
    y = x.new_empty(num_tokens, d_out)
    if not num_tokens:
        return y
    tile = product_tile(num_tokens, x.dtype.itemsize)
    programs = -(-d_out // tile.block_n), -(-num_tokens // tile.block_m)
    splits = num_splits(programs[0] * programs[1], -(-d_in // tile.block_k), x.device)
    parts = torch.empty(splits, num_tokens, d_out, dtype=torch.float32, device=x.device) if splits > 1 else scales
    offset = x if bias is None else bias
    kernel = handle(
        "multiply_integers",
        x.dtype,
        x.device,
        (
            ("BLOCK_M", tile.block_m), ("BLOCK_N", tile.block_n), ("BLOCK_K", tile.block_k), ("GROUP", kind.group),
            ("BITS", kind.bits), ("ZERO", kind.zero), ("FLIPPED", kind.signed), ("OFFSETS", kind.offsets),
            ("SPLITS", splits), ("EVEN_K", d_in % tile.block_k == 0), ("BIAS", bias is not None),
            ("PRECISION", "ieee"),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    strides = y.stride(0), x.stride(0), values.stride(0), scales.stride(0)
    kernel((*programs, splits), (y, parts, x, values, scales, offset), (d_out, d_in, *strides), num_tokens)
    if splits > 1:
        sizes = ("BLOCK", _JOINED), ("SPLITS", splits), ("BIAS", bias is not None)
        join = handle("join_products", x.dtype, x.device, sizes)
        join((num_tokens, -(-d_out // _JOINED), 1), (y, parts, offset), (d_out, y.stride(0)), num_tokens)
    return y
