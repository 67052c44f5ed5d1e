"""Rotary position embedding by the compiled kernel: one call where eager torch takes sixteen."""

from __future__ import annotations

import torch
from torch import Tensor

from atmm.cpu import library


def serves_rotation(device: torch.device, dtype: torch.dtype) -> bool:
    kernels = library() if device.type == "cpu" else None
    return kernels is not None and dtype in kernels.rotate


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    kernels = library()
    assert kernels is not None, "the compiled kernels are not available"
    num_tokens, head_dim = cos.shape
    kernels.rotate[q.dtype](
        q.data_ptr(), q.stride(0), q.stride(1), q.shape[0], k.data_ptr(), k.stride(0), k.stride(1), k.shape[0],
        cos.data_ptr(), sin.data_ptr(), num_tokens, head_dim,
    )  # fmt: skip
