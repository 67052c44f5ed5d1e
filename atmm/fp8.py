"""Weights in eight-bit floats (e4m3), with a scale per output row; a product rounds its inputs likewise, per token.

On a GPU `torch._scaled_mm` multiplies the eight-bit values, from compute capability 8.9 on. Elsewhere the values are
multiplied in float32, which gives the same results up to the order of sums and is slow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atmm.row_scaled import RowScaled

CAPABILITY = (8, 9)
"""The lowest compute capability with products of eight-bit floats."""
ALIGNMENT = 16
"""On a GPU, both sizes of a weight must be multiples of this."""


class Fp8(RowScaled):
    """A `WeightFormat`. On a GPU, products need inputs in bfloat16."""

    name = "fp8"
    value_dtype = torch.float8_e4m3fn
    largest = 448.0

    def product(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        if x.device.type != "cuda":
            return super().product(x, values, scales, bias)
        own, token_scales = self._encode_tokens(x)
        return torch._scaled_mm(own, values.t(), token_scales, scales.t(), bias=bias, out_dtype=x.dtype)  # noqa: SLF001  (torch)

    def _encode_tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`encode` of tokens x [T, in] on a GPU, in one launch."""
        from atmm.triton import pointwise  # importing Triton is slow

        values = torch.empty(x.shape, dtype=self.value_dtype, device=x.device)
        scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
        pointwise.quantize_rows(values, scales, x, self.largest)
        return values, scales
