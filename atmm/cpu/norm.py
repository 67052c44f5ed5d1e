"""Root-mean-square normalization by the compiled kernel: one pass where eager torch takes eight."""

from __future__ import annotations

import torch
from torch import Tensor

from atmm.cpu import library


def serves_norm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel exists for this device and type."""
    kernels = library() if device.type == "cpu" else None
    return kernels is not None and dtype in kernels.normalize


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`weight * (x / sqrt(mean(x^2) + epsilon))` over the last dimension, the quotient rounded to x's type first.

    Requires `serves_norm`. The values of a row do not depend on other rows.

    Args:
        x: [..., width].
        weight: [width], contiguous, of x's type.
        epsilon: added to the mean square.

    Returns:
        A contiguous tensor of x's shape.

    Raises:
        ValueError: if shapes or types do not match.
    """
    width = x.shape[-1]
    if weight.shape != (width,) or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}; expected contiguous ({width},) {x.dtype} "
            f"for x of shape {tuple(x.shape)}"
        )
    rows = x.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    kernels = library()
    assert kernels is not None, "the compiled kernels are not available"
    kernels.normalize[x.dtype](
        out.data_ptr(), rows.data_ptr(), rows.stride(0), weight.data_ptr(), rows.shape[0], width, epsilon
    )
    return out
