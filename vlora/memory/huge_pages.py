"""Large buffers, in huge pages where the system has them.

A decode step walks through gigabytes once. In pages of 4 KiB it waits for addresses to be translated as much as for
the bytes: the same factors are read 1.3 to 1.6 times as fast from pages of 2 MiB (docs/decisions.md, 2026-11-22).
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE_BYTES = 2 * 2**20
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.empty`; on a CPU it starts at a huge page's boundary, and the system is asked for huge pages.

    Where it has none, or is set to give none, this is memory like any other. Raises what torch raises for a device
    that lacks memory, OSError for a CPU that does.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if _ADVICE is None or not _served(device, num_bytes):
        return torch.empty(*shape, dtype=dtype, device=device)
    mapped = mmap.mmap(-1, num_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        mapped.madvise(_ADVICE)
    raw = torch.frombuffer(mapped, dtype=torch.uint8)  # which keeps the mapping for as long as a view of it lives
    skip = -raw.data_ptr() % _HUGE_BYTES
    return raw[skip : skip + num_bytes].view(dtype).view(*shape)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy of a large tensor that lies there; the tensor itself where huge pages are not for it."""
    if _ADVICE is None or not _served(tensor.device, tensor.nbytes):
        return tensor
    return empty(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def _served(device: torch.device, num_bytes: int) -> bool:
    return device.type == "cpu" and num_bytes >= _HUGE_BYTES
