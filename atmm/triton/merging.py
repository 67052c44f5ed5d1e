"""Merging adapters into weights on a GPU: one launch for all neighbouring layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from atmm.quantized import Integers
from atmm.triton.handles import Handle, handle
from atmm.triton.tiling import block_r, merge_blocks


def merge(out: Tensor, base: Tensor, a: Tensor, bt: Tensor, scale: float) -> None:
    """`atmm.merge` for tensors with a contiguous last dimension."""
    n, d_out, d_in = base.shape
    kernel, block_n, block_k = _kernel("merge", out, a, d_out, d_in)
    strides = [stride for tensor in (out, base, a, bt) for stride in tensor.stride()[:2]]
    kernel(
        (n, -(-d_out // block_n), -(-d_in // block_k)),
        (out, base, a, bt),
        (a.shape[1], d_out, d_in, *strides),
        float(scale),
    )


def merge_rows(
    values: Tensor, scales: Tensor, base: Tensor, base_scales: Tensor, a: Tensor, bt: Tensor, largest: float
) -> None:
    """`atmm.operator` for one part that covers the weights, in a format with a scale per row.

    Args:
        values: The result, [n, o, i]; the last dimension is contiguous, also of `base`, a and bt.
        scales: The result's scales, [n, o, 1], contiguous within a layer, as `base_scales`.
        base: Values of the weights, [n, o, i].
        base_scales: Their scales, [n, o, 1].
        a: [n, r, i].
        bt: [n, r, o].
    """
    n, d_out, d_in = base.shape
    integers = not values.dtype.is_floating_point
    kernel, block_n, _ = _kernel("merge_rows", values, a, d_out, d_in, [("INTEGERS", integers)])
    weights = (*values.stride()[:2], scales.stride(0), *base.stride()[:2], base_scales.stride(0))
    factors = (*a.stride()[:2], *bt.stride()[:2])
    kernel(
        (n, -(-d_out // block_n), 1),
        (values, scales, base, base_scales, a, bt),
        (a.shape[1], d_out, d_in, *weights, *factors),
        largest,
    )


def merge_groups(
    values: Tensor, scales: Tensor, base: Tensor, base_scales: Tensor, a: Tensor, bt: Tensor, kind: Integers
) -> None:
    """As `merge_rows`, in a format with scales by group: [n, o, groups], or twice as many with offsets."""
    n, d_out, d_in = base.shape[0], bt.shape[2], a.shape[2]
    sizes = ("GROUP", kind.group), ("BITS", kind.bits), ("OFFSETS", kind.offsets)
    kernel, block_n, block_k = _kernel("merge_groups", values, a, d_out, d_in, sizes)
    strides = [stride for tensor in (values, scales, base, base_scales, a, bt) for stride in tensor.stride()[:2]]
    kernel(
        (n, -(-d_out // block_n), -(-d_in // block_k)),
        (values, scales, base, base_scales, a, bt),
        (a.shape[1], d_out, d_in, *strides),
    )


def _kernel(
    name: str, out: Tensor, a: Tensor, d_out: int, d_in: int, more: Iterable[tuple[str, Any]] = ()
) -> tuple[Handle, int, int]:
    """The handle, and the outputs and inputs of a block. more: further sizes of the kernel."""
    rows = block_r(a.shape[1])
    block_n, block_k = merge_blocks(a.dtype.itemsize)
    sizes = (
        ("BLOCK_N", block_n), ("BLOCK_K", block_k), ("BLOCK_R", rows), ("MAX_RANK", -(-a.shape[1] // rows) * rows),
        *more, ("EVEN", d_out % block_n == 0 and d_in % block_k == 0), ("PRECISION", "ieee"),
    )  # fmt: skip
    return handle(name, a.dtype, out.device, sizes), block_n, block_k
