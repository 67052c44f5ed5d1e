"""Patch embeddings as linear products, instead of the published convolutions with stride = kernel.

cuDNN takes seconds for Qwen's convolution in three dimensions. A CPU multiplies faster too (docs/decisions/0045).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from atmm.matmul import patch_products


class _Patches(nn.Module):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return patch_products(input, self.weight, self.bias)


_CLASSES: dict[type, type] = {k: type(f"Patch{k.__name__}", (_Patches, k), {}) for k in (nn.Conv2d, nn.Conv3d)}


def convert_patch_embeddings(model: nn.Module) -> int:
    """Compute convolutions of disjoint patches as products with the same weights, not copied. Returns their number."""
    found = [module for module in model.modules() if type(module) in _CLASSES and _is_disjoint(module)]
    for module in found:
        module.__class__ = _CLASSES[type(module)]
    return len(found)


def _is_disjoint(conv: Any) -> bool:
    plain = conv.groups == 1 and set(conv.dilation) == {1} and (conv.padding == "valid" or set(conv.padding) == {0})
    return plain and conv.stride == conv.kernel_size and conv.weight.is_contiguous()
