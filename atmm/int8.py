"""Weights in eight-bit integers with a scale per output row, for CPUs; a product rounds its inputs likewise, per token.

A compiled kernel for AVX512-VNNI or AVX2 multiplies the integers and reads the weights in place; both give the same
sums. Elsewhere they are multiplied in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atmm.cpu import library
from atmm.row_scaled import RowScaled

_MOST_INPUTS = 2**16  # of a layer: 255 * 127 times this fits an int32


def multiplies_int8() -> bool:
    """Whether this machine has the compiled kernel and its instructions."""
    kernels = library()
    return kernels is not None and kernels.has_int8


class Int8(RowScaled):
    """A `WeightFormat`."""

    name = "int8"
    value_dtype = torch.int8
    largest = 127.0

    def product(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        kernels = library()
        d_out, d_in = values.shape
        if kernels is None or not kernels.has_int8 or x.dtype not in kernels.int8 or d_in > _MOST_INPUTS:
            return super().product(x, values, scales, bias)
        x = x if x.stride(1) == 1 else x.contiguous()
        y = x.new_empty(x.shape[0], d_out)
        kernels.int8[x.dtype](
            *(y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0)),
            *(values.data_ptr(), values.stride(0), scales.data_ptr(), None if bias is None else bias.data_ptr()),
            *(x.shape[0], d_in, d_out),
        )
        return y

    def _rounded(self, quotients: Tensor) -> Tensor:
        return quotients.round_().to(self.value_dtype)
