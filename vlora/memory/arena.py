"""The arena's bytes: one device allocation of which KV blocks and adapters are views (ownership: `PageAllocator`)."""

from __future__ import annotations

import math

import torch

from vlora.memory.huge_pages import empty

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
