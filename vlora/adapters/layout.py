"""An adapter as one run of bytes, laid out the same way in host memory and in the arena: bringing it is one copy.

First every layer's A, then every layer's Bt, in the order of the model's sites, each tensor at a 256-byte boundary:
neighbouring layers of one rank are then one strided view [layers, rank, dim], which merging reads in one call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from vlora.parallel.cut import FactorShape

ALIGNMENT = 256  # bytes at which every tensor starts: one full GPU cache line pair, any vector width


class HostFactors(NamedTuple):
    """One layer's factors, scaling folded into bt; their `FactorShape` says what they are. Dense ones are a [r, d_in]
    and bt [r, d_out], and delta = (x a^T) bt."""

    a: torch.Tensor
    bt: torch.Tensor


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def run_bytes(shapes: Mapping[str, FactorShape], dtype: torch.dtype) -> int:
    """Bytes of a run that holds factors of these shapes, by layer."""
    return sum(aligned(math.prod(size) * dtype.itemsize) for _, _, size in _tensors(shapes))


def carve(run: torch.Tensor, shapes: Mapping[str, FactorShape], dtype: torch.dtype) -> dict[str, HostFactors]:
    """Views of every layer's factors in a run of bytes (uint8, at least `run_bytes` long), in the order of `shapes`."""
    values = run.view(dtype)
    views: dict[tuple[str, int], torch.Tensor] = {}
    offset = values.storage_offset()
    for name, side, size in _tensors(shapes):
        views[name, side] = values.as_strided(size, (size[1], 1), offset)
        offset += aligned(math.prod(size) * dtype.itemsize) // dtype.itemsize
    return {name: HostFactors(views[name, 0], views[name, 1]) for name in shapes}


def _tensors(shapes: Mapping[str, FactorShape]) -> Iterator[tuple[str, int, tuple[int, int]]]:
    for side in (0, 1):
        for name, shape in shapes.items():
            yield name, side, (shape.rows_bt, shape.d_out) if side else (shape.rows_a, shape.d_in)
