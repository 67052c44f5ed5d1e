"""Rotary position embeddings of the model's attention layers, computed by one kernel where the device has one.

The models' own code runs otherwise: in training, and for attention that rotates in another way.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import atmm
from vlora.models.class_changes import change_classes

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
