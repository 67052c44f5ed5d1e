"""RMS norms of the model's layers, computed by one kernel instead of eight eager torch kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import atmm
from vlora.models.class_changes import change_classes


class _FusedNorm(nn.Module):
    """A mixin for the class of a norm `weight * round(x / sqrt(mean(x^2) + variance_epsilon))`."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        fits = hidden_states.dtype == weight.dtype and not torch.is_grad_enabled()
        if fits and atmm.serves_norm(weight.device, weight.dtype):
            return atmm.rms_norm(hidden_states, weight, self.variance_epsilon)
        normalized: torch.Tensor = super().forward(hidden_states)
        return normalized


def fuse_norms(model: nn.Module) -> int:
    """Let every RMS norm of a model use the kernel of its device, if it computes this function.

    A class qualifies if its name ends with RMSNorm, it has the two parameters, and it returns the same as the formula
    for some values. Without a kernel the model's own code runs.

    Returns:
        The number of replaced norms.
    """
    return change_classes(model, _fused)


def _fused(norm: Any) -> type | None:
    kind = type(norm)
    if not kind.__name__.endswith("RMSNorm") or not hasattr(norm, "variance_epsilon"):
        return None
    return type(f"Fused{kind.__name__}", (_FusedNorm, kind), {}) if _computes_the_same(norm) else None


@torch.inference_mode()
def _computes_the_same(norm: Any) -> bool:
    weight = norm.weight
    if weight.is_meta:  # a model that is never run
        return False
    x = torch.linspace(-3, 5, 2 * weight.numel(), device=weight.device).view(2, -1).to(weight.dtype)
    wide = x.float()
    quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    own, formula = norm(x).float(), (weight * quotient.to(weight.dtype)).float()
    tolerance = 4 * torch.finfo(weight.dtype).eps * float(own.abs().max())
    return own.shape == formula.shape and bool((own - formula).abs().max() <= tolerance)
