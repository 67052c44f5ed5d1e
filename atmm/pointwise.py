"""Operations of a layer that one kernel computes instead of several eager ones: norms, rotation, gates, KV writes.

Every kernel rounds where the eager operations round, so results are equal up to the order of a norm's sum. On a CPU
the norm and the rotation have a kernel (`atmm.cpu`): a gate is as fast by two eager operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atmm.cpu import library
from atmm.strategies.registry import reads_in_place


def serves_pointwise(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `gate_product`, and a kernel of `write_kv`, exist for this device and type."""
    return reads_in_place(device, dtype)


def serves_norm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `rms_norm` exists for this device and type."""
    return serves_pointwise(device, dtype) or _has_kernel("normalize", device, dtype)


def serves_rotation(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `rotate` exists for this device and type."""
    return serves_pointwise(device, dtype) or _has_kernel("rotate", device, dtype)


def _has_kernel(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    kernels = library() if device.type == "cpu" else None
    return kernels is not None and dtype in getattr(kernels, name)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`weight * (x / sqrt(mean(x^2) + epsilon))` over the last dimension, the quotient rounded to x's type first.

    Requires `serves_norm`. The values of a row do not depend on other rows.

    Args:
        x: [..., width].
        weight: [width], contiguous, of x's type.

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
    if serves_pointwise(x.device, x.dtype):
        from atmm.triton import pointwise  # importing Triton is slow

        return pointwise.rms_norm(x, weight, epsilon)
    kernels = library()
    assert kernels is not None, "the compiled kernels are not available"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, stride = x, width
    if not x.is_contiguous():
        rows = x.reshape(-1, width)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        stride = rows.stride(0)
    count = x.numel() // width
    kernels.normalize[x.dtype](out.data_ptr(), rows.data_ptr(), stride, weight.data_ptr(), count, width, epsilon)
    return out


def gate_product(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, silu rounded to its type first. Requires `serves_pointwise`.

    Args:
        gate: [..., width].
        up: of the same shape, type and device.

    Returns:
        A contiguous tensor of this shape.

    Raises:
        ValueError: if shapes or types do not match.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate is {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype}")
    from atmm.triton import pointwise

    return pointwise.gate_product(gate, up)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary position embedding `x * cos + rotate_half(x) * sin`, in place. Requires `serves_rotation`.

    Args:
        q: queries [heads, T, head_dim], with contiguous rows (last stride 1).
        k: keys [kv_heads, T, head_dim], likewise.
        cos: [T, head_dim], contiguous, of the type of q.
        sin: likewise.

    Raises:
        ValueError: if shapes, types or strides do not fit, or half of head_dim is not a power of two.
    """
    head_dim, half = q.shape[2], q.shape[2] // 2
    fits = cos.shape == sin.shape == (q.shape[1], head_dim) and k.shape[1:] == q.shape[1:]
    if not fits or half & (half - 1) or not half:
        raise ValueError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)}; expected "
            "[heads, T, d], [kv_heads, T, d] and twice [T, d], half of d a power of two"
        )
    if not q.dtype == k.dtype == cos.dtype == sin.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, cos {cos.dtype} and sin {sin.dtype}; give one type")
    if q.stride(2) != 1 or k.stride(2) != 1 or not cos.is_contiguous() or not sin.is_contiguous():
        raise ValueError(
            f"q has strides {q.stride()} and k {k.stride()}; the last one must be 1, and cos, sin contiguous"
        )
    if not q.shape[1]:
        return
    if serves_pointwise(q.device, q.dtype):
        from atmm.triton import pointwise

        pointwise.rotate(q, k, cos, sin)
        return
    kernels = library()
    assert kernels is not None, "the compiled kernels are not available"
    kernels.rotate[q.dtype](
        q.data_ptr(), q.stride(0), q.stride(1), q.shape[0], k.data_ptr(), k.stride(0), k.stride(1), k.shape[0],
        cos.data_ptr(), sin.data_ptr(), *cos.shape,
    )  # fmt: skip


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> None:
    """Write keys and values of tokens to their rows of the cache, on any device.

    Args:
        k_cache: [rows, width], last stride 1.
        v_cache: likewise, with the row stride of k_cache.
        k: [T, width], last stride 1, of the caches' type.
        rows: int32 or int64 [T], different rows of the caches.

    Raises:
        ValueError: if shapes or strides do not fit.
    """
    shapes = k_cache.shape[1] == v_cache.shape[1] == k.shape[1] and v.shape == k.shape and rows.shape == k.shape[:1]
    strides = k_cache.stride() == v_cache.stride() and 1 == k_cache.stride(1) == k.stride(1) == v.stride(1)
    if not shapes or not strides:
        raise ValueError(
            f"k is {tuple(k.shape)}, v {tuple(v.shape)}, rows {tuple(rows.shape)}, k_cache {tuple(k_cache.shape)} and "
            f"v_cache {tuple(v_cache.shape)}; expected [T, width], [T] and [rows, width] with contiguous rows"
        )
    if not serves_pointwise(k.device, k.dtype):
        k_cache.index_copy_(0, rows, k)
        v_cache.index_copy_(0, rows, v)
    elif len(k):
        from atmm.triton import pointwise

        pointwise.write_kv(k_cache, v_cache, k, v, rows)
