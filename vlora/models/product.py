"""The product of a linear layer, arranged for the batch at hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Rows up to which the transposed arrangement wins (docs/decisions.md, 2026-11-21).
_THIN = 128


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., d_in] times weight [d_out, d_in] transposed, plus bias; [..., d_out], not always contiguous.

    On a CPU in bfloat16 a thin batch is multiplied as `weight @ x^T`: the weight is then the left operand and is read
    once as it lies, which takes about 0.7 of the time of `x @ weight^T`. A single row goes as two equal ones, for the
    same reason.
    """
    num_rows = x.numel() // x.shape[-1]
    if num_rows > _THIN or weight.dtype is not torch.bfloat16 or weight.device.type != "cpu":
        return F.linear(x, weight, bias)
    columns = x.reshape(num_rows, -1).expand(max(2, num_rows), -1).t()
    y = torch.mm(weight, columns) if bias is None else torch.addmm(bias[:, None], weight, columns)
    return y.t()[:num_rows].view(*x.shape[:-1], weight.shape[0])
