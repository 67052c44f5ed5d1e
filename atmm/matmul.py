"""The product of linear layers, `x W^T + b`, by the way that is fastest for the batch, the weights and the processor.

rows      the compiled kernels: every row of weights is read once, as it lies, at the speed of memory. For decoding.
left      `W x^T`, the weight as the left operand; the result lies transposed. For thin bfloat16 batches where the
          processor has matrix tiles.
float32   a bfloat16 product in float32, a block of weights at a time. For prompts on a processor whose bfloat16
          instructions are slower than those of float32 (Intel's without matrix tiles), or which has none: there torch's
          own product reaches a tenth of the processor's speed.
library   torch's own product. For everything else, and the only one that autograd follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atmm.cpu.products import Weights, multiplies, product
from atmm.processor import multiplies_bfloat16, prefers_weight_left

Way = Literal["rows", "left", "float32", "library"]
Key = tuple[int, int, int, torch.dtype]
"""Rows rounded up to a power of two, d_out, d_in, dtype: what one measured choice is for."""

measured: dict[Key, Way] = {}
"""Choices of `atmm.tuning.matmul_choice.measure`, which go before the rule."""

# Tokens up to which the rows' kernels are the fastest, where the alternatives are torch's float32 product, torch's
# bfloat16 product on a processor that has the instructions, and the product in float32 (docs/decisions.md, 2026-11-23).
_THIN_FLOAT32 = 24
_THIN_BFLOAT16 = 32
_THIN_WITHOUT_BFLOAT16 = 48
_FEW = 4  # rows up to which a product without instructions for its type may be bound by memory
_MOST_ROWS = 512  # more are multiplied in the way that is fastest for so many
_BLOCK = 8 * 2**20  # weights that are converted to float32 at a time: 32 MiB


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., d_in] times weight [d_out, d_in] transposed, plus bias: [..., d_out], not always contiguous."""
    num_rows = x.numel() // x.shape[-1]
    way = choose(num_rows, weight)
    if way == "library":
        return F.linear(x, weight, bias)
    y = WAYS[way](x.reshape(num_rows, -1), (Weights(weight, bias),))
    return y.view(*x.shape[:-1], weight.shape[0])


def linears(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """Outputs of layers that read one input x [T, d_in], side by side: [T, sum of d_out]."""
    weights = [Weights(layer.weight, layer.bias) for layer in layers]
    return WAYS[choose(len(x), weights[0].weight)](x, weights)


def joins(num_rows: int, weight: Tensor) -> bool:
    """Whether layers that read one input had better be computed together (`linears`): where one call costs less than
    several, or their outputs can lie side by side at no cost."""
    return weight.is_cuda or choose(num_rows, weight) in ("rows", "left")


def choose(num_rows: int, weight: Tensor) -> Way:
    """How so many rows are multiplied with a weight: as measured at start, else by the rule."""
    if weight.device.type != "cpu" or num_rows == 0 or torch.is_grad_enabled():
        return "library"
    way = measured.get(key_of(num_rows, weight)) if measured else None
    return way or rule(num_rows, weight)


def key_of(num_rows: int, weight: Tensor) -> Key:
    """What a choice for so many rows is stored under."""
    return (1 << (min(num_rows, _MOST_ROWS) - 1).bit_length(), *weight.shape, weight.dtype)


def ways(num_rows: int, weight: Tensor) -> list[Way]:
    """The ways that can multiply so many rows with this weight on the CPU, without those known to be far slower."""
    slow = _is_slow(weight)
    found: list[Way] = []
    if multiplies(weight):
        found.append("rows")
    if not slow or num_rows <= _FEW or not found:
        found.append("library")
    if slow:
        found.append("float32")
    if prefers_weight_left(num_rows, weight.dtype, weight.device):
        found.append("left")
    return found


def rule(num_rows: int, weight: Tensor) -> Way:
    """What is chosen for a weight on the CPU where nothing was measured."""
    if prefers_weight_left(num_rows, weight.dtype, weight.device):
        return "left"
    slow = _is_slow(weight)
    thin = _THIN_WITHOUT_BFLOAT16 if slow else _THIN_BFLOAT16 if weight.dtype is torch.bfloat16 else _THIN_FLOAT32
    if num_rows <= thin and multiplies(weight):
        return "rows"
    return "float32" if slow and num_rows > 1 else "library"


def _is_slow(weight: Tensor) -> bool:
    """Whether a product with this weight is slower in its own type than in float32."""
    return weight.dtype is torch.bfloat16 and not multiplies_bfloat16()


def _library(x: Tensor, layers: Sequence[Weights]) -> Tensor:
    widths = [layer.weight.shape[0] for layer in layers]
    y = x.new_empty(len(x), sum(widths))
    for (weight, bias), part in zip(layers, y.split(widths, 1), strict=True):
        if bias is None:
            torch.mm(x, weight.t(), out=part)
        else:
            torch.addmm(bias, x, weight.t(), out=part)
    return y


def _left(x: Tensor, layers: Sequence[Weights]) -> Tensor:
    # A single row goes as two equal ones: oneDNN then reads the weight as it lies.
    columns = x.expand(max(2, len(x)), -1).t()
    widths = [layer.weight.shape[0] for layer in layers]
    y = x.new_empty(sum(widths), columns.shape[1])
    for (weight, bias), part in zip(layers, y.split(widths), strict=True):
        if bias is None:
            torch.mm(weight, columns, out=part)
        else:
            torch.addmm(bias[:, None], weight, columns, out=part)
    return y.t()[: len(x)]


def _float32(x: Tensor, layers: Sequence[Weights]) -> Tensor:
    y = x.new_empty(len(x), sum(layer.weight.shape[0] for layer in layers))
    wide = x.float()
    first = 0
    for weight, bias in layers:
        done = 0
        for block in weight.split(max(1, _BLOCK // weight.shape[1])):
            sums = torch.mm(wide, block.float().t())
            if bias is not None:
                sums += bias[done : done + len(block)]
            y[:, first : first + len(block)] = sums
            first += len(block)
            done += len(block)
    return y


WAYS: dict[Way, Callable[[Tensor, Sequence[Weights]], Tensor]] = {
    "rows": product,
    "left": _left,
    "float32": _float32,
    "library": _library,
}
