"""Weights in eight-bit floats (e4m3), with a scale per output row; a product rounds its inputs likewise, per token.

On a GPU `torch._scaled_mm` multiplies the eight-bit values, from compute capability 8.9 on. Elsewhere the values are
multiplied in float32, which gives the same results up to the order of sums and is slow.
"""

from __future__ import annotations

import torch
from torch import Tensor

CAPABILITY = (8, 9)
"""The lowest compute capability with products of eight-bit floats."""
ALIGNMENT = 16
"""On a GPU, both sizes of a weight must be multiples of this."""

_LARGEST = 448.0  # of e4m3
_SMALLEST = 1e-12  # largest value of a row from which its scale is computed: a row of zeros needs a scale too
_BLOCK = 8 * 2**20  # weights that are converted to float32 at a time, without a GPU


class Fp8:
    """A `WeightFormat`. On a GPU, products need inputs in bfloat16."""

    name = "fp8"
    value_dtype = torch.float8_e4m3fn
    weights_per_value = 1
    weights_per_scale: int | None = None

    def encode(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        wide = weight.float()
        scales = wide.abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST).div_(_LARGEST)
        return (wide / scales).to(self.value_dtype), scales

    def decode(self, values: Tensor, scales: Tensor) -> Tensor:
        return values.float().mul_(scales)

    def product(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        if x.device.type == "cuda":
            own, token_scales = self._encode_tokens(x)
            return torch._scaled_mm(own, values.t(), token_scales, scales.t(), bias=bias, out_dtype=x.dtype)
        wide = self.decode(*self.encode(x))
        y = x.new_empty(len(x), len(values))
        num_rows = max(1, _BLOCK // values.shape[1])
        for first in range(0, len(values), num_rows):
            rows = slice(first, first + num_rows)
            sums = torch.mm(wide, values[rows].float().t()).mul_(scales[rows].t())
            y[:, rows] = sums if bias is None else sums.add_(bias[rows])
        return y

    def _encode_tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`encode` of tokens x [T, in] on a GPU, in one launch."""
        from atmm.triton import pointwise  # importing Triton is slow

        values = torch.empty(x.shape, dtype=self.value_dtype, device=x.device)
        scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
        pointwise.quantize_rows(values, scales, x, _LARGEST)
        return values, scales
