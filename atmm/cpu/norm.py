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
    """`atmm.rms_norm` on a CPU."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = x.new_empty(x.shape)
    kernels = library()
    assert kernels is not None, "the compiled kernels are not available"
    kernels.normalize[x.dtype](
        out.data_ptr(), rows.data_ptr(), rows.stride(0), weight.data_ptr(), rows.shape[0], width, epsilon
    )
    return out
