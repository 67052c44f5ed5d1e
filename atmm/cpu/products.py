"""Products of linear layers by the compiled kernels, which read the weights in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atmm.cpu import library


class Weights(NamedTuple):
    """One layer: weight [d_out, d_in] and bias [d_out] or None, as `nn.Linear` holds them."""

    weight: Tensor
    bias: Tensor | None


def multiplies(weight: Tensor) -> bool:
    """Whether kernels exist for this weight's device and type, and its rows are contiguous."""
    if not weight.is_cpu or weight.stride(1) != 1:
        return False
    kernels = library()
    return kernels is not None and weight.dtype in kernels.linear


def has_tiles(dtype: torch.dtype) -> bool:
    """Whether the kernels multiply this type by matrix tiles."""
    kernels = library()
    return dtype is torch.bfloat16 and kernels is not None and kernels.has_tiles


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`product` with one layer, for x [..., d_in]: [..., d_out], contiguous.

    Without the lists and views of several layers, which take as long as the kernel of a small layer.
    """
    kernels = library()
    assert kernels is not None, "the compiled kernels are not available"
    d_out, d_in = weight.shape
    if not x.is_contiguous():
        x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], d_out))
    offset = 0 if bias is None else bias.data_ptr()
    layer = (ctypes.c_int64 * 6)(weight.data_ptr(), weight.stride(0), offset, y.data_ptr(), d_out, d_out)
    kernels.linear[x.dtype](layer, 1, x.data_ptr(), d_in, x.numel() // d_in, d_in)
    return y


def product(x: Tensor, layers: Sequence[Weights]) -> Tensor:
    """Outputs of layers that read one input x [T, d_in], side by side: [T, sum of d_out].

    Each output is one sum in float32, in an order that depends only on d_in, so the values of a token do not depend on
    the other tokens of the batch. Requires `multiplies` for every weight.
    """
    kernels = library()
    assert kernels is not None, "the compiled kernels are not available"
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, d_in = x.shape
    widths = [layer.weight.shape[0] for layer in layers]
    row = sum(widths)
    y = x.new_empty(num_rows, row)
    address, size = y.data_ptr(), y.element_size()
    table: list[int] = []
    for (weight, bias), d_out in zip(layers, widths, strict=True):
        table += weight.data_ptr(), weight.stride(0), 0 if bias is None else bias.data_ptr(), address, row, d_out
        address += d_out * size
    numbers = (ctypes.c_int64 * len(table))(*table)  # the call keeps it, as a `Tape` may
    kernels.linear[x.dtype](numbers, len(layers), x.data_ptr(), x.stride(0), num_rows, d_in)
    return y
