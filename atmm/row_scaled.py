"""Weights in eight bits with a scale per output row; a product rounds its inputs likewise, per token."""

from __future__ import annotations

import torch
from torch import Tensor

from atmm.quantized import BLOCK

_SMALLEST = 1e-12  # largest value of a row from which its scale is computed: a row of zeros needs a scale too


class RowScaled:
    """Common to these formats; a `WeightFormat` needs also a name.

    Attributes:
        value_dtype: the type of the values.
        largest: the value of a row's largest weight.
    """

    value_dtype: torch.dtype
    largest: float
    weights_per_value = 1
    alignment = 1

    def num_scales(self, d_in: int) -> int:
        return 1

    def encode(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        wide = weight.float()
        scales = wide.abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST).div_(self.largest)
        return self._rounded(wide / scales), scales

    def decode(self, values: Tensor, scales: Tensor) -> Tensor:
        return values.float().mul_(scales)

    def product(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """The values are multiplied in float32, which is slow and right up to the rounding of sums."""
        wide = self.decode(*self.encode(x))
        y = x.new_empty(len(x), len(values))
        num_rows = max(1, BLOCK // values.shape[1])
        for first in range(0, len(values), num_rows):
            rows = slice(first, first + num_rows)
            sums = torch.mm(wide, values[rows].float().t()).mul_(scales[rows].t())
            y[:, rows] = sums if bias is None else sums.add_(bias[rows])
        return y

    def _rounded(self, quotients: Tensor) -> Tensor:
        """To the nearest value of the format. May overwrite its argument."""
        return quotients.to(self.value_dtype)
