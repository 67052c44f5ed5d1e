"""Rotary embeddings, RMS norms and gated MLPs of a model with one kernel each, and patch embeddings as products.

The models' own code runs otherwise: in training, and for layers that compute something else.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import atmm
from atmm.matmul import patch_products

_ROTATION = "apply_rotary_pos_emb"  # the function's name in the models' code


def fuse_rotations(model: nn.Module) -> int:
    """Let every attention with rotary embeddings of a model use the kernel, if it fits.

    An attention qualifies if its code calls `apply_rotary_pos_emb` and this function returns the same as the formula.
    Its code then runs with a function in place of that one that uses the kernel where there is one.

    Returns:
        The number of changed attention layers.
    """
    return change_classes(model, lambda module: _fused_attention(type(module)))


def _fused_attention(kind: type) -> type | None:
    forward = kind.__dict__.get("forward")
    if not isinstance(forward, types.FunctionType) or _ROTATION not in forward.__code__.co_names:
        return None
    plain = forward.__globals__.get(_ROTATION)
    if isinstance(plain, _Rotation) or plain is None or not _rotates(plain):
        return None
    names = {**forward.__globals__, _ROTATION: _Rotation(plain)}
    changed = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return type(f"Rotating{kind.__name__}", (kind,), {"forward": changed})


class _Rotation:
    """`apply_rotary_pos_emb`, in place by the kernel where there is one."""

    def __init__(self, plain: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._plain = plain

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [1, heads, T, head_dim], k [1, kv_heads, T, head_dim], cos and sin [1, T, head_dim]."""
        half = q.shape[-1] // 2
        fits = q.shape[0] == 1 and cos.shape == (1, q.shape[2], 2 * half) and not half & (half - 1)
        alike = q.dtype == k.dtype == cos.dtype == sin.dtype  # not so under autocast
        usual = fits and alike and q.stride(-1) == k.stride(-1) == 1 and not rest and not options
        if not usual or torch.is_grad_enabled() or not atmm.serves_rotation(q.device, q.dtype):
            return self._plain(q, k, cos, sin, *rest, **options)
        atmm.rotate(q[0], k[0], cos[0].contiguous(), sin[0].contiguous())
        return q, k


def _rotates(function: Callable[..., Any]) -> bool:
    """Whether the function computes `x * cos + rotate_half(x) * sin` for both of its first arguments."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (2, 1))
    cos, sin = (torch.randn(1, 3, 8, generator=generator) for _ in range(2))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    try:
        got = function(q, k, cos, sin)
    except (TypeError, RuntimeError, IndexError, ValueError):
        return False  # another signature
    return len(got) == 2 and all(torch.equal(own, rotated(x)) for own, x in zip(got, (q, k), strict=True))


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


class _Patches(nn.Module):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return patch_products(input, self.weight, self.bias)


_CLASSES: dict[type, type] = {k: type(f"Patch{k.__name__}", (_Patches, k), {}) for k in (nn.Conv2d, nn.Conv3d)}


def convert_patch_embeddings(model: nn.Module) -> int:
    """Compute convolutions of disjoint patches as products with the same weights, not copied. Returns their number.

    cuDNN takes seconds for Qwen's convolution in three dimensions. A CPU multiplies faster too (docs/decisions/0045).
    """
    found = [module for module in model.modules() if type(module) in _CLASSES and _is_disjoint(module)]
    for module in found:
        module.__class__ = _CLASSES[type(module)]
    return len(found)


def _is_disjoint(conv: Any) -> bool:
    plain = conv.groups == 1 and set(conv.dilation) == {1} and (conv.padding == "valid" or set(conv.padding) == {0})
    return plain and conv.stride == conv.kernel_size and conv.weight.is_contiguous()


def change_classes(model: nn.Module, target_of: Callable[[nn.Module], type | None]) -> int:
    """Give modules of a model another class, in place.

    Args:
        target_of: The class to use instead of a module's own; None to keep it. Called once per class.

    Returns:
        The number of changed modules.
    """
    targets: dict[type, type | None] = {}
    number = 0
    for module in model.modules():
        kind = type(module)
        if kind not in targets:
            targets[kind] = target_of(module)
        target = targets[kind]
        if target is not None:
            module.__class__ = target
            number += 1
    return number
