"""Gated MLPs of the model's layers with one kernel for the gate, where the device has one.

The models' own code runs otherwise: in training, and for MLPs that compute something else.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import atmm
from vlora.models.class_changes import change_classes


class _FusedMLP(nn.Module):
    """A mixin for the class of an MLP `down_proj(silu(gate_proj(x)) * up_proj(x))`."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or not atmm.serves_pointwise(x.device, x.dtype):
            plain: torch.Tensor = super().forward(x)
            return plain
        product: torch.Tensor = self.down_proj(atmm.gate_product(self.gate_proj(x), self.up_proj(x)))
        return product


def fuse_gates(model: nn.Module) -> int:
    """Let every gated MLP of a model use the kernel, if it fits.

    An MLP qualifies if it has the three projections and its class returns the same as the formula for some values.

    Returns:
        The number of changed MLPs.
    """
    return change_classes(model, _fused_mlp)


def _fused_mlp(mlp: Any) -> type | None:
    kind = type(mlp)
    projections = (getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if isinstance(mlp, _FusedMLP) or not all(isinstance(projection, nn.Linear) for projection in projections):
        return None
    weight = mlp.gate_proj.weight
    if weight.is_meta:  # a model that is never run
        return None
    with torch.inference_mode():
        dtype = getattr(mlp.gate_proj, "stored", weight).dtype  # a quantized weight's values have another
        x = torch.linspace(-1, 1, mlp.gate_proj.in_features, dtype=dtype, device=weight.device)[None]
        same = torch.equal(mlp(x), mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))
    return type(f"Fused{kind.__name__}", (_FusedMLP, kind), {}) if same else None
