"""Operations of a layer that one kernel computes instead of several eager ones: norms, rotation, gates, KV writes.

Every kernel rounds where the eager operations round, so results are equal up to the order of a norm's sum, and to the
last bit of a gate's exponential. On a CPU (`atmm.cpu`) a norm includes the sum before it, and a rotation the KV write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atmm.cpu import Library, library
from atmm.strategies.registry import reads_in_place


def serves_pointwise(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels exist for this device and type. `write_kv` and `add_rms_norm` need none."""
    return reads_in_place(device, dtype) or _compiled(device, dtype) is not None


def _compiled(device: torch.device, dtype: torch.dtype) -> Library | None:
    kernels = library() if device.type == "cpu" and not reads_in_place(device, dtype) else None
    return kernels if kernels is not None and dtype in kernels.normalize else None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`weight * (x / sqrt(mean(x^2) + epsilon))` over the last dimension, the quotient rounded to x's type first.

    Requires `serves_pointwise`. The values of a row do not depend on other rows.

    Args:
        x: [..., width].
        weight: [width], contiguous, of x's type.

    Returns:
        A contiguous tensor of x's shape.

    Raises:
        ValueError: if shapes or types do not match.
    """
    width = _checked_width(x, weight)
    kernels = _compiled(x.device, x.dtype)
    if kernels is None:
        from atmm.triton import pointwise  # importing Triton is slow

        return pointwise.rms_norm(x, weight, epsilon)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, stride = _rows(x)
    count = x.numel() // width
    kernels.normalize[x.dtype](
        out.data_ptr(), rows.data_ptr(), stride, None, 0, weight.data_ptr(), count, width, epsilon
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`x += added` in place, both [T, width] of one type and x contiguous, and `rms_norm` of the sum."""
    width = _checked_width(x, weight)
    if added.shape != x.shape or added.dtype != x.dtype or not x.is_contiguous():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype} and added {tuple(added.shape)} {added.dtype}, or x strided")
    kernels = _compiled(x.device, x.dtype)
    if kernels is None:
        return rms_norm(x.add_(added), weight, epsilon)
    out = torch.empty_like(x)
    rows, stride = _rows(added)
    kernels.normalize[x.dtype](
        out.data_ptr(), x.data_ptr(), width, rows.data_ptr(), stride, weight.data_ptr(), len(x), width, epsilon
    )  # fmt: skip
    return out


def _checked_width(x: Tensor, weight: Tensor) -> int:
    width = x.shape[-1]
    if weight.shape != (width,) or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}; expected contiguous ({width},) {x.dtype} "
            f"for x of shape {tuple(x.shape)}"
        )
    return width


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x as rows of adjacent values, and their stride."""
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


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
    kernels = _compiled(gate.device, gate.dtype)
    if kernels is None:
        from atmm.triton import pointwise

        return pointwise.gate_product(gate, up)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    (gates, by_gate), (ups, by_up) = _rows(gate), _rows(up)
    width = gate.shape[-1]
    kernels.gate_product[gate.dtype](
        out.data_ptr(), gates.data_ptr(), by_gate, ups.data_ptr(), by_up, gate.numel() // max(1, width), width
    )  # fmt: skip
    return out


def gelu(x: Tensor, *, quick: bool) -> Tensor:
    """`x * sigmoid(1.702 * x)`, or gelu with a tanh. On a CPU, and requires `serves_pointwise`.

    Returns:
        A contiguous tensor of x's shape.
    """
    kernels = _compiled(x.device, x.dtype)
    assert kernels is not None, "the compiled kernels are not available"
    x = x.contiguous()
    out = torch.empty_like(x)
    kernels.gelu[x.dtype](out.data_ptr(), x.data_ptr(), x.numel(), quick)
    return out


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary position embedding `x * cos + rotate_half(x) * sin`, in place. Requires `serves_pointwise`.

    Args:
        q: queries [heads, T, head_dim], with contiguous rows (last stride 1).
        k: keys [kv_heads, T, head_dim], likewise.
        cos: [T, head_dim], contiguous, of the type of q. On a CPU it may be float32: then only the result is rounded.
        sin: likewise.

    Raises:
        ValueError: if shapes, types or strides do not fit, or, on a GPU, half of head_dim is not a power of two.
    """
    _check_rotation(q, k, cos, sin)
    if not q.shape[1]:
        return
    kernels = _compiled(q.device, q.dtype)
    if kernels is None:
        from atmm.triton import pointwise

        pointwise.rotate(q, k, cos, sin)
        return
    _launch_rotation(kernels, q, k, cos, sin, None, None, 0, None, None, 0)


def try_to_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """`rotate` tensors that meet its requirements, except for contiguous cosines and sines. Returns whether they do."""
    if not serves_pointwise(q.device, q.dtype):
        return False
    cos, sin = cos.contiguous(), sin.contiguous()
    try:
        rotate(q, k, cos, sin)
    except ValueError:
        return False
    return True


def rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor
) -> None:
    """`rotate` q and k in place, then `write_kv` k and v [T, kv_heads * head_dim] to int64 rows, as both require."""
    kernels = _compiled(q.device, q.dtype)
    width = k.shape[0] * k.shape[2]
    if kernels is None:
        rotate(q, k, cos, sin)
        write_kv(k_cache, v_cache, k.transpose(0, 1).reshape(-1, width), v, rows)
        return
    _check_rotation(q, k, cos, sin)
    _check_cache(k_cache, v_cache, v, v, rows)
    alike = q.dtype == v.dtype == k_cache.dtype == v_cache.dtype
    if not alike or v.shape != (k.shape[1], width) or rows.dtype is not torch.int64 or not rows.is_contiguous():
        raise ValueError(
            f"v is {tuple(v.shape)} {v.dtype}, of {k_cache.dtype} and kv_heads {len(k)}, rows {rows.dtype}"
        )
    cache = k_cache.data_ptr(), v_cache.data_ptr(), k_cache.stride(0), rows.data_ptr(), v.data_ptr(), v.stride(0)
    _launch_rotation(kernels, q, k, cos, sin, *cache)


def _launch_rotation(kernels: Library, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *cache: int | None) -> None:
    rows = (number for x in (q, k) for number in (x.data_ptr(), x.stride(0), x.stride(1), x.shape[0]))
    wide = cos.dtype is torch.float32
    kernels.rotate[q.dtype](*rows, cos.data_ptr(), sin.data_ptr(), wide, *cos.shape, *cache)


def _check_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    head_dim, half = q.shape[2], q.shape[2] // 2
    compiled = _compiled(q.device, q.dtype) is not None
    fits = cos.shape == sin.shape == (q.shape[1], head_dim) and k.shape[1:] == q.shape[1:]
    if not fits or head_dim % 2 or not half or (half & (half - 1) and not compiled):
        raise ValueError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)}; expected "
            "[heads, T, d], [kv_heads, T, d] and twice [T, d], half of d a power of two on a GPU"
        )
    wide = compiled and cos.dtype is torch.float32
    if q.dtype != k.dtype or cos.dtype != sin.dtype or not (wide or cos.dtype == q.dtype):
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, cos {cos.dtype} and sin {sin.dtype}; give one type")
    if q.stride(2) != 1 or k.stride(2) != 1 or not cos.is_contiguous() or not sin.is_contiguous():
        raise ValueError(
            f"q has strides {q.stride()} and k {k.stride()}; the last one must be 1, and cos, sin contiguous"
        )


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
    _check_cache(k_cache, v_cache, k, v, rows)
    if not reads_in_place(k.device, k.dtype):
        k_cache.index_copy_(0, rows, k)
        v_cache.index_copy_(0, rows, v)
    elif len(k):
        from atmm.triton import pointwise

        pointwise.write_kv(k_cache, v_cache, k, v, rows)


def _check_cache(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> None:
    shapes = k_cache.shape[1] == v_cache.shape[1] == k.shape[1] and v.shape == k.shape and rows.shape == k.shape[:1]
    strides = k_cache.stride() == v_cache.stride() and 1 == k_cache.stride(1) == k.stride(1) == v.stride(1)
    if not shapes or not strides:
        raise ValueError(
            f"k is {tuple(k.shape)}, v {tuple(v.shape)}, rows {tuple(rows.shape)}, k_cache {tuple(k_cache.shape)} and "
            f"v_cache {tuple(v_cache.shape)}; expected [T, width], [T] and [rows, width] with contiguous rows"
        )
