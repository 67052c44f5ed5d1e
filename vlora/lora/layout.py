"""An adapter as one run of bytes, with the same layout in host memory and in the arena, so that loading is one copy.

Every layer's A comes first, then every layer's Bt, in the order of the model's sites, each tensor at a 256-byte
boundary. Neighbouring layers of equal rank are one strided view [layers, rank, dim], which merging reads in one call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from vlora.parallel.adapter_sharding import FactorShape

ALIGNMENT = 256  # bytes at which every tensor starts: one full GPU cache line pair, any vector width


class HostFactors(NamedTuple):
    """One layer's factors, with the scaling folded into bt; their `FactorShape` describes them.

    Dense factors are a [r, d_in] and bt [r, d_out], with delta = (x a^T) bt.
    """

    a: torch.Tensor
    bt: torch.Tensor


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def run_bytes(shapes: Mapping[str, FactorShape], dtype: torch.dtype) -> int:
    return _layout(tuple(shapes.values()), dtype).num_bytes


def carve(run: torch.Tensor, shapes: Mapping[str, FactorShape], dtype: torch.dtype) -> dict[str, HostFactors]:
    """Views of every layer's factors in a run of bytes (uint8, at least `run_bytes` long), in the order of `shapes`."""
    values = run.view(dtype)
    first = values.storage_offset()
    layout = _layout(tuple(shapes.values()), dtype)

    def view(place: _Place) -> torch.Tensor:
        return values.as_strided(place.size, place.stride, first + place.offset)

    return {name: HostFactors(view(a), view(bt)) for name, a, bt in zip(shapes, layout.a, layout.bt, strict=True)}


class _Place(NamedTuple):
    size: tuple[int, int]
    stride: tuple[int, int]
    offset: int


class _Layout(NamedTuple):
    a: tuple[_Place, ...]
    bt: tuple[_Place, ...]
    num_bytes: int


@functools.lru_cache(maxsize=256)
def _layout(shapes: tuple[FactorShape, ...], dtype: torch.dtype) -> _Layout:
    """Cached, because thousands of adapters with equal layouts are loaded and evicted between steps."""
    sizes = [(shape.rows_a, shape.d_in) for shape in shapes] + [(shape.rows_bt, shape.d_out) for shape in shapes]
    places: list[_Place] = []
    num_bytes = 0
    for size in sizes:
        places.append(_Place(size, (size[1], 1), num_bytes // dtype.itemsize))
        num_bytes += aligned(math.prod(size) * dtype.itemsize)
    return _Layout(tuple(places[: len(shapes)]), tuple(places[len(shapes) :]), num_bytes)
