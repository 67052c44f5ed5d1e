"""Plain products in the type in which torch is fastest."""

from __future__ import annotations

import torch
from torch import Tensor

from atmm.processor import prefers_float32

BLOCK_ROWS, BLOCK_SUMS = 128, 2**17  # at most, of a block: half a MiB of sums, as large as a core's cache


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as they are, or in float32 if torch's products of their type are slower (docs/decisions/0092).

    Args:
        tensors: of one dtype, on one device.
    """
    return tuple(each.float() for each in tensors) if prefers_float32(tensors[0].dtype, tensors[0].device) else tensors


def add_product(y: Tensor, u: Tensor, v: Tensor, *, alpha: float = 1.0) -> None:
    """Add `alpha * u v` to y, in place; u and v may be widened. Their product is then added in blocks, because as a
    whole it would leave the cache between product and addition, and might occupy new pages in every call.
    """
    if u.dtype is y.dtype:
        y.addmm_(u, v, alpha=alpha)
        return
    if y.numel() <= BLOCK_SUMS:
        y.add_(torch.mm(u, v), alpha=alpha)
        return
    columns = BLOCK_SUMS // min(len(y), BLOCK_ROWS)
    for rows, left in zip(y.split(BLOCK_ROWS), u.split(BLOCK_ROWS), strict=True):
        for block, right in zip(rows.split(columns, 1), v.split(columns, 1), strict=True):
            block.add_(torch.mm(left, right), alpha=alpha)
