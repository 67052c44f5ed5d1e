"""Emulation of the library of grouped products on the CPU: the same functions with the same addresses as on the GPU.

`problems.h`, which computes the addresses, is compiled for this machine; the products themselves are torch's.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atmm import cutlass
from atmm.cutlass import TileKernels
from atmm.cutlass.tiling import SPACE, Tile

_WRAPPER = """
#include "problems.h"
extern "C" int point(const atmm::Problem* problems, int64_t count, char* buffer, char* x, int64_t x_stride,
                     int64_t d_in, char* pool, char* hidden, char* y, int64_t y_stride, int64_t column, void*) {
  const atmm::Layer layer{x, pool, hidden, y, d_in, x_stride, y_stride, column};
  for (int64_t index = 0; index < count; ++index) atmm::point(problems, count, index, layer, buffer);
  return 0;
}
"""


@functools.cache
def _compiled_point() -> Callable[..., int]:
    """`point` of the header."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "wrapper.cpp"), Path(folder, "wrapper.so")
        source.write_text(_WRAPPER)
        flags = ("-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{Path(cutlass.__file__).parent}")
        subprocess.run([os.environ.get("CXX", "c++"), *flags, source, "-o", made], check=True)
        function = ctypes.CDLL(str(made)).point
    function.argtypes = (ctypes.c_int64,) * 12
    return function


class Product(NamedTuple):
    """Addresses, row strides in elements, and the sizes of left [m, k], right and out [m, n]."""

    left: int
    right: int
    out: int
    left_stride: int
    right_stride: int
    out_stride: int
    m: int
    n: int
    k: int


def products(buffer: int, count: int, half: int) -> Iterator[Product]:
    """The products in the argument buffer of a launch; half 0 is the shrink, 1 the expand."""
    begin = buffer + 64 * count * half
    for index in range(count):
        fields = [ctypes.c_int64.from_address(begin + 8 * (field * count + index)).value for field in range(6)]
        sizes = [ctypes.c_int32.from_address(begin + 48 * count + 4 * (3 * index + field)).value for field in range(3)]
        yield Product(*fields, *sizes)


class Emulated:
    """Replaces `atmm.cutlass.CutlassLibrary`. calls: the names of the launches so far."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.tiles = {
            (dtype, tile.name): TileKernels(tile, *self._kernels_of(tile, dtype))
            for dtype in (torch.bfloat16, torch.float16)
            for tile in SPACE
        }

    def point(self, *arguments: int) -> int:
        self.calls.append("point")
        return _compiled_point()(*arguments)

    def _kernels_of(self, tile: Tile, dtype: torch.dtype) -> tuple[Callable[..., int], Callable[..., int]]:
        def shrink(buffer: int, count: int, num_tiles: int, stream: int) -> int:
            self.calls.append("shrink")
            problems = list(products(buffer, count, 0))
            _check(problems, tile, num_tiles)
            for p in problems:
                left = matrix(p.left, p.m, p.k, p.left_stride, dtype)
                right = matrix(p.right, p.n, p.k, p.right_stride, dtype)
                matrix(p.out, p.m, p.n, p.out_stride, dtype).copy_(left.float() @ right.float().t())
            return 0

        def expand(buffer: int, count: int, first: int, num: int, num_tiles: int, sign: float, stream: int) -> int:
            self.calls.append("expand")
            problems = list(products(buffer, count, 1))[first : first + num]
            assert len(problems) == num
            _check(problems, tile, num_tiles)
            for p in problems:
                left = matrix(p.left, p.m, p.k, p.left_stride, dtype)
                right = matrix(p.right, p.k, p.n, p.right_stride, dtype)
                out = matrix(p.out, p.m, p.n, p.out_stride, dtype)
                out.copy_(sign * (left.float() @ right.float()) + out.float())
            return 0

        return shrink, expand


def matrix(address: int, rows: int, columns: int, stride: int, dtype: torch.dtype) -> Tensor:
    """A view [rows, columns] of 16-bit values at an address, with row stride `stride` in elements."""
    count = (rows - 1) * stride + columns
    memory = (ctypes.c_char * (2 * count)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided((rows, columns), (stride, 1))


def _check(problems: list[Product], tile: Tile, num_tiles: int) -> None:
    """The requirements of CUTLASS: 128-bit accesses, and no value written twice in one launch."""
    assert num_tiles == sum(tile.num_tiles(p.m, p.n) for p in problems)
    for p in problems:
        assert min(p.m, p.n, p.k) > 0
        assert not any(address % 16 for address in p[:3])
        assert not any(size % 8 for size in (*p[3:6], p.n, p.k))
    written = sorted(
        (start, start + 2 * p.n)
        for p in problems
        for start in range(p.out, p.out + 2 * p.m * p.out_stride, 2 * p.out_stride)
    )
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(written))
