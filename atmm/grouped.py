"""Weights in four or eight bits with scales by groups of inputs.

On a GPU they are restored in registers, and inputs are not rounded. On a CPU a compiled kernel for AVX512-VNNI or AVX2
multiplies the integers, reads the weights in place and rounds inputs to eight bits by groups of 32: a relative error of
0.5 %, beside 8.6 % of weights in four bits. Elsewhere weights are restored block by block, and inputs are not rounded.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from atmm.cpu import library
from atmm.matmul import linear
from atmm.quantized import BLOCK, Integers

GROUPS = (32, 64, 128)
"""Sizes of groups, apart from whole rows."""


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A `WeightFormat`: weight = (value - zero) * scale, with the scale and the zero of its group.

    Values [..., out, in / weights_per_value] are unsigned, two of four bits in a byte: the first in its lower half. The
    scales [..., out, groups] are followed by the offsets, -zero * scale, unless the format is symmetric, with the zero
    in the middle of the values.

    Attributes:
        bits: 4 or 8.
        group: inputs with one scale, one of `GROUPS`; None: all inputs of a row.
        symmetric: whether there are no offsets.
    """

    value_dtype: ClassVar[torch.dtype] = torch.uint8

    bits: int
    group: int | None
    symmetric: bool

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def alignment(self) -> int:
        return self.group or 32

    @property
    def weights_per_value(self) -> int:
        return 8 // self.bits

    def num_scales(self, d_in: int) -> int:
        return d_in // (self.group or d_in) * (1 if self.symmetric else 2)

    def encode(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Symmetric: the largest weight of a group has the value 0, the one farthest from zero. Otherwise the smallest
        weight has the lowest and the largest the highest value."""
        groups = weight.float().unflatten(-1, (-1, self.group or weight.shape[-1]))
        if self.symmetric:
            largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
            scales = largest / -self._middle
            quotients = groups / _nonzero(scales) + self._middle
            rows = [scales]
        else:
            smallest = groups.amin(-1, keepdim=True)
            scales = (groups.amax(-1, keepdim=True) - smallest) / self._highest
            quotients = (groups - smallest) / _nonzero(scales)
            rows = [scales, smallest]
        values = quotients.round_().clamp_(0, self._highest).to(torch.uint8).flatten(-2)
        return self.pack(values), torch.cat(rows, -2).squeeze(-1)

    def pack(self, values: Tensor) -> Tensor:
        """Values [..., in], one in each byte, as they are stored."""
        return values[..., ::2] | values[..., 1::2] << 4 if self.bits == 4 else values

    def decode(self, values: Tensor, scales: Tensor) -> Tensor:
        if self.bits == 4:
            values = torch.stack([values & 15, values >> 4], -1).flatten(-2)
        weight = values.float()
        groups = weight.unflatten(-1, (-1, self.group or weight.shape[-1]))
        if self.symmetric:
            groups.sub_(self._middle).mul_(scales[..., None])
        else:
            own, offsets = scales.chunk(2, -1)
            groups.mul_(own[..., None]).add_(offsets[..., None])
        return weight

    def product(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        if x.device.type == "cuda":
            from atmm.triton.products import multiply  # importing Triton is slow

            return multiply(x, values, scales, bias, self.integers)
        kernels = library()
        if kernels is None or not kernels.has_int8:
            return self._restored_product(x, values, scales, bias)
        wide = x if x.dtype in kernels.int8 else x.float()
        own = wide if wide.stride(1) == 1 else wide.contiguous()
        own_bias = None if bias is None else bias.to(own.dtype)
        num_tokens, d_in = x.shape
        y = own.new_empty(num_tokens, values.shape[0])
        # Symmetric: the offset of a group is -middle * scale.
        offsets, factor = (scales, -self._middle) if self.symmetric else (scales[:, scales.shape[1] // 2 :], 1)
        kernel = kernels.int4_groups if self.bits == 4 else kernels.int8_groups
        kernel[own.dtype](
            *(y.data_ptr(), y.stride(0), own.data_ptr(), own.stride(0)),
            *(values.data_ptr(), values.stride(0), scales.data_ptr(), offsets.data_ptr(), scales.stride(0), factor),
            *(None if own_bias is None else own_bias.data_ptr(), num_tokens, d_in, y.shape[1], self.group or d_in),
        )
        return y if own is x else y.to(x.dtype)

    def _restored_product(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        num_rows = max(1, BLOCK // x.shape[1])
        y = x.new_empty(len(x), len(values))
        for first in range(0, len(values), num_rows):
            rows = slice(first, first + num_rows)
            weight = self.decode(values[rows], scales[rows]).to(x.dtype)
            y[:, rows] = linear(x, weight, None if bias is None else bias[rows])
        return y

    @property
    def integers(self) -> Integers:
        """The format as the GPU kernels take it."""
        return Integers(
            self.bits, self.group or 0, self._middle if self.symmetric else 0, signed=False, offsets=not self.symmetric
        )

    @property
    def _highest(self) -> int:
        return 2**self.bits - 1

    @property
    def _middle(self) -> int:
        return 2 ** (self.bits - 1)


def _nonzero(scales: Tensor) -> Tensor:
    """A group of zeros needs a scale to divide by, too."""
    return scales.masked_fill(scales == 0, 1)
