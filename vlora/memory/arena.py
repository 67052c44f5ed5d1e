"""The arena's bytes: one device allocation of which KV blocks and adapters are views (ownership: `PageAllocator`)."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE_BYTES = 2 * 2**20
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like `torch.empty`; on a CPU, large buffers are aligned to huge pages and huge pages are requested.

    A decode step reads gigabytes once: from pages of 2 MiB 1.3 to 1.6 times as fast (docs/decisions/0017).
    Falls back to ordinary pages where the system has no huge pages or does not grant them.

    Raises:
        OSError: host memory is exhausted. On other devices torch raises its own error.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if ADVICE is None or not _served(device, num_bytes):
        return torch.empty(*shape, dtype=dtype, device=device)
    mapped = mmap.mmap(-1, num_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel does not support huge pages
        mapped.madvise(ADVICE)
    raw = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping alive as long as any view exists
    skip = -raw.data_ptr() % _HUGE_BYTES
    return raw[skip : skip + num_bytes].view(dtype).view(*shape)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy of a large CPU tensor in huge pages; the tensor itself where huge pages do not apply."""
    if ADVICE is None or not _served(tensor.device, tensor.nbytes):
        return tensor
    return empty(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def _served(device: torch.device, num_bytes: int) -> bool:
    return device.type == "cpu" and num_bytes >= _HUGE_BYTES


PAGE_BYTES = 64 * 1024


def block_pages(num_layers: int, block_size: int, kv_dim: int, dtype: torch.dtype) -> int:
    """Pages per KV block: all layers, K and V.

    Rounded up so that a block is a whole number of both pages and rows.
    """
    row = kv_dim * dtype.itemsize
    unit = math.lcm(row, PAGE_BYTES)
    return math.ceil(num_layers * 2 * block_size * row / unit) * unit // PAGE_BYTES


class Arena:
    """`num_pages` pages of 64 KiB in one allocation, accessed through typed views.

    The KV side is one matrix `[rows, kv_dim]` over the whole arena. Token `offset` of block `b`, layer `l`, is in row
    `b * R + (2 * l + is_v) * block_size + offset`, where R is the number of rows per block. A layer's rows are the base
    rows plus a constant, so one index array per step serves all layers.
    """

    def __init__(self, num_pages: int, device: torch.device) -> None:
        self.num_pages = num_pages
        self.num_copied = 0  # pages copied since start
        raw = empty([num_pages * PAGE_BYTES + PAGE_BYTES], torch.uint8, device)
        skip = -raw.data_ptr() % PAGE_BYTES
        self.bytes = raw[skip : skip + num_pages * PAGE_BYTES]

    def copy(self, first_page: int, target: int, num_pages: int) -> None:
        """Copy pages to a range that starts at `target`; the ranges may overlap.

        On a GPU the copy is ordered on the current stream, so steps queued earlier read the old content.
        """
        step = min(abs(target - first_page), num_pages)  # chunk size that does not overwrite pages still to be copied
        if step == 0:
            return
        offsets = range(0, num_pages, step)
        for offset in offsets if target < first_page else reversed(offsets):
            size = min(step, num_pages - offset)
            self.buffer(target + offset, size).copy_(self.buffer(first_page + offset, size))
        self.num_copied += num_pages

    def kv_matrix(self, dtype: torch.dtype, kv_dim: int) -> torch.Tensor:
        """The whole arena as `[rows, kv_dim]`; a tail shorter than a row is dropped."""
        flat = self.bytes.view(dtype)
        rows = flat.numel() // kv_dim
        return flat[: rows * kv_dim].view(rows, kv_dim)

    def buffer(self, first_page: int, num_pages: int) -> torch.Tensor:
        """A run of pages as uint8 `[num_pages * PAGE_BYTES]`."""
        return self.bytes[first_page * PAGE_BYTES : (first_page + num_pages) * PAGE_BYTES]


def pages_for(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES)
