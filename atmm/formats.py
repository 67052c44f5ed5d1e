"""The formats of quantized weights by name.

In eight bits, a weight has a scale per output row, and a product rounds its inputs likewise, per token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atmm.cpu import library
from atmm.grouped import Grouped
from atmm.quantized import BLOCK, Integers, WeightFormat

_SMALLEST = 1e-12  # largest value of a row from which its scale is computed: a row of zeros needs a scale too


class RowScaled:
    """Common to formats in eight bits; a `WeightFormat` needs also a name.

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


FP8_CAPABILITY = (8, 9)
"""The lowest compute capability with products of eight-bit floats."""
FP8_ALIGNMENT = 16
"""On a GPU, both sizes of a weight must be multiples of this."""


class Fp8(RowScaled):
    """Eight-bit floats (e4m3). On a GPU `torch._scaled_mm` multiplies them, from compute capability 8.9 on, with inputs
    in bfloat16. Elsewhere they are multiplied in float32: the same results up to the order of sums, slowly.
    """

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


_MOST_INPUTS = 2**16  # of a layer: 255 * 127 times this fits an int32


def multiplies_int8() -> bool:
    """Whether this machine has the compiled kernel and its instructions."""
    kernels = library()
    return kernels is not None and kernels.has_int8


class Int8(RowScaled):
    """Eight-bit integers. On a CPU a compiled kernel for AVX512-VNNI or AVX2 multiplies them and reads the weights in
    place; both give the same sums. On a GPU weights are restored in registers, and inputs are not rounded. Elsewhere
    they are multiplied in float32.
    """

    name = "int8"
    value_dtype = torch.int8
    largest = 127.0
    integers = Integers(8, 0, 128, signed=True, offsets=False)

    def product(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        if x.device.type == "cuda":
            from atmm.triton.products import multiply  # importing Triton is slow

            return multiply(x, values, scales, bias, self.integers)
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


FORMATS: Mapping[str, WeightFormat] = {"fp8": Fp8(), "int8": Int8(), "int4": Grouped(4, 32, symmetric=True)}
