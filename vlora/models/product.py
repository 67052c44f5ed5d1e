"""The product of a linear layer, arranged for the batch at hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from atmm.processor import prefers_weight_left


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., d_in] times weight [d_out, d_in] transposed, plus bias; [..., d_out], not always contiguous.

    Where the processor prefers it, a thin batch is multiplied as `weight @ x^T`: the weight is then the left operand
    and is read once as it lies. A single row goes as two equal ones, for the same reason.
    """
    num_rows = x.numel() // x.shape[-1]
    if not prefers_weight_left(num_rows, weight.dtype, weight.device):
        return F.linear(x, weight, bias)
    y = weight.new_empty(weight.shape[0], max(2, num_rows))
    _multiply(y, weight, bias, _columns(x, num_rows))
    return y.t()[:num_rows].view(*x.shape[:-1], weight.shape[0])


def joins(num_rows: int, weight: torch.Tensor) -> bool:
    """Whether layers that read one input had better be computed together (`linears`): where the outputs can lie side by
    side for nothing."""
    return weight.is_cuda or prefers_weight_left(num_rows, weight.dtype, weight.device)


def linears(x: torch.Tensor, layers: Sequence[nn.Linear]) -> torch.Tensor:
    """Outputs of layers that read one input x [T, d_in], side by side: [T, sum of d_out]."""
    widths = [layer.out_features for layer in layers]
    if not prefers_weight_left(len(x), x.dtype, x.device):
        y = x.new_empty(len(x), sum(widths))
        for layer, part in zip(layers, y.split(widths, 1), strict=True):
            if layer.bias is None:
                torch.mm(x, layer.weight.t(), out=part)
            else:
                torch.addmm(layer.bias, x, layer.weight.t(), out=part)
        return y
    columns = _columns(x, len(x))
    y = x.new_empty(sum(widths), columns.shape[1])
    for layer, part in zip(layers, y.split(widths), strict=True):
        _multiply(part, layer.weight, layer.bias, columns)
    return y.t()[: len(x)]


def _columns(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    return x.reshape(num_rows, -1).expand(max(2, num_rows), -1).t()


def _multiply(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, columns: torch.Tensor) -> None:
    if bias is None:
        torch.mm(weight, columns, out=y)
    else:
        torch.addmm(bias[:, None], weight, columns, out=y)
