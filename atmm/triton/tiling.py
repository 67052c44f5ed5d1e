"""Tilings of the Triton kernels: the search space on a GPU, and the rules that exclude bad tilings."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

SHARED_BYTES = {
    (8, 0): 166_912, (8, 6): 101_376, (8, 7): 166_912, (8, 9): 101_376, (9, 0): 232_448, (10, 0): 232_448,
    (12, 0): 101_376,
}  # fmt: skip
"""The most of a block, by compute capability (CUDA programming guide). Default tilings fit into the least."""
LEAST_SHARED = min(SHARED_BYTES.values())
_MOST_SUMS = 128  # float32 sums in the registers of one thread; more spill
_MOST_SINGLE = 32 * 128  # sums of a single launch, which also keeps hidden values in registers
_MOST_SINGLE_INPUTS = 32 * (128 + 128)  # sums and inputs of a single launch; more spill on compute capability 9.0
# The largest float32 blocks. With 128 inputs at a time, some single launches spill on compute capability 9.0, and some
# shrinks on 8.0 (Triton 3.9); with 64, the largest single launch uses 154 of 255 registers.
_FLOAT32_M, _FLOAT32_N, _FLOAT32_K = 16, 128, 64
_FLOAT32_SINGLE_N = 64
# Sizes without stages of two-byte tilings with a kernel that spills 8 bytes in Triton 3.6: a single launch on compute
# capability 9.0 or 8.0, the expand on 9.0.
_SPILLED = frozenset({(16, 128, 64, 0), (32, 64, 128, 0), *((16, 64, block_k, 8) for block_k in (64, 128, 256))})
_WORD = 16  # bytes per load of a thread
_MOST_FINALISTS = 24


class Tiling(NamedTuple):
    """Sizes of one tile. All are powers of two, blocks at least 16.

    block_m: tokens. block_n: outputs of an expand. block_k: inputs that a shrink multiplies at a time. split_k:
    programs that share one sum over the inputs; 0 combines shrink and expand in one launch, in which every block of
    outputs repeats the shrink. num_stages: pipeline stages.
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_stages: int

    @property
    def num_warps(self) -> int:
        return 8 if self.block_m > 64 else 4

    @property
    def name(self) -> str:
        return f"tiled m{self.block_m} n{self.block_n} k{self.block_k} s{self.split_k} p{self.num_stages}"

    @classmethod
    def named(cls, name: str) -> Tiling:
        """The tiling with this name. Raises ValueError for an invalid name."""
        found = re.fullmatch(r"tiled m(\d+) n(\d+) k(\d+) s(\d+) p(\d+)", name)
        if found is None:
            raise ValueError(f"{name!r} is not a tiling; expected a name such as 'tiled m16 n128 k128 s4 p3'")
        return cls(*map(int, found.groups()))


def block_r(rank: int) -> int:
    """Number of rows of a factor multiplied at a time."""
    return 16 if rank <= 16 else 32 if rank <= 32 else 64


def fits(tiling: Tiling, itemsize: int, shared_bytes: int = SHARED_BYTES[8, 0]) -> bool:
    """Whether the tiling works for any rank, on a GPU with this much shared memory for a block.

    It needs enough shared memory and registers, and one word of each factor for every thread.

    Split sums and single launches are for thin batches; with larger tiles they spill registers. So do float32 products,
    because their operands are in registers: tensor cores cannot compute them without rounding the operands.
    """
    rows = block_r(64)
    shared = tiling.num_stages * tiling.block_k * (tiling.block_m + rows) * itemsize
    threads = 32 * tiling.num_warps
    if block_r(1) * min(tiling.block_n, tiling.block_k) * itemsize < _WORD * threads:
        return False
    block_n = _FLOAT32_N if tiling.split_k else _FLOAT32_SINGLE_N
    if itemsize == 4 and (tiling.block_m > _FLOAT32_M or tiling.block_n > block_n or tiling.block_k > _FLOAT32_K):
        return False
    if itemsize == 2 and tiling[:4] in _SPILLED:
        return False
    if tiling.split_k != 1 and tiling.block_m > 32:
        return False
    sums, inputs = tiling.block_m * tiling.block_n, tiling.block_m * tiling.block_k
    if tiling.split_k == 0 and (sums > _MOST_SINGLE or sums + inputs > _MOST_SINGLE_INPUTS):
        return False
    return shared <= shared_bytes and tiling.block_m * max(tiling.block_n, rows) <= _MOST_SUMS * threads


def space(itemsize: int, shared_bytes: int = SHARED_BYTES[8, 0]) -> Iterator[Tiling]:
    """Every tiling that fits, for values of this many bytes."""
    for sizes in itertools.product((16, 32, 64, 128), (64, 128, 256), (64, 128, 256), (0, 1, 2, 4, 8), (2, 3, 4)):
        tiling = Tiling(*sizes)
        if fits(tiling, itemsize, shared_bytes):
            yield tiling


def sensible(itemsize: int, d_in: int, longest: int, num_tokens: int, shared_bytes: int) -> Iterator[Tiling]:
    """The tilings worth timing for a shape. longest: tokens of the longest lane.

    Excluded are: tiles that would be mostly empty; sums split into parts of less than two blocks; split sums if the
    tokens alone give every multiprocessor a tile; and a single launch if repeating the shrink costs more than the
    expand.
    """
    for tiling in space(itemsize, shared_bytes):
        empty = tiling.block_m > 16 and tiling.block_m >= 2 * longest
        slivers = tiling.split_k > 1 and (tiling.split_k * tiling.block_k * 2 > d_in or num_tokens > 1024)
        wasteful = tiling.split_k == 0 and num_tokens > 64
        if not empty and not slivers and not wasteful:
            yield tiling


def finalists(
    itemsize: int, d_in: int, longest: int, num_tokens: int, num_programs: int, shared_bytes: int = SHARED_BYTES[8, 0]
) -> list[Tiling]:
    """The tilings of `sensible` that are nearest to the default one for the shape, so that a search measures 24 instead
    of some 250; a quarter of them are single launches where those are sensible. Arguments as `sensible` and `usual`.
    """
    centre = usual(itemsize, d_in, longest, num_programs)
    among = list(sensible(itemsize, d_in, longest, num_tokens, shared_bytes))
    single = sorted((each for each in among if not each.split_k), key=lambda each: _steps_between(each, centre))
    split = sorted((each for each in among if each.split_k), key=lambda each: _steps_between(each, centre))
    single = single[: _MOST_FINALISTS // 4]
    return [*split[: _MOST_FINALISTS - len(single)], *single]


def _steps_between(one: Tiling, other: Tiling) -> float:
    """Doublings or halvings of sizes that lead from one tiling to the other. A pipeline stage counts more than one, so
    that the nearest tilings differ in their sizes first.
    """
    sizes = zip(one[:4], other[:4], strict=True)
    doublings = sum(abs(math.log2(own / its)) for own, its in sizes if own and its)
    return doublings + 1.5 * abs(one.num_stages - other.num_stages)


def shrink_programs(lengths: Iterable[int], num_sites: int, rank: int) -> int:
    """Programs of a shrink at split_k 1, for tiles of 64 tokens.

    Args:
        num_sites: Sites with a lane's adapter.
        rank: The highest.
    """
    return sum(-(-length // 64) for length in lengths) * num_sites * -(-rank // block_r(rank))


def usual(itemsize: int, d_in: int, longest: int, num_programs: int, multiprocessors: int = 132) -> Tiling:
    """The default tiling without measurements.

    num_programs: see `shrink_programs`.
    """
    wanted = max(16, multiprocessors // 16 * 16)  # about one for each
    few = num_programs < wanted  # sums are split, and tiles of 64 tokens lack registers for that
    block_m = 16 if longest <= 16 or itemsize == 4 else 32 if longest <= 32 or few else 64
    block_k = _usual_block_k(itemsize)
    split_k = 1
    while num_programs * split_k < wanted and split_k < _MOST_SPLIT and d_in >= 4 * split_k * block_k:
        split_k *= 2
    return Tiling(block_m, 128, block_k, split_k, 3)


def all_usual(itemsize: int) -> Iterator[Tiling]:
    splits = [2**power for power in range(_MOST_SPLIT.bit_length())]
    for block_m, split_k in itertools.product((16, 32, 64), splits):
        tiling = Tiling(block_m, 128, _usual_block_k(itemsize), split_k, 3)
        if fits(tiling, itemsize):
            yield tiling


def merge_blocks(itemsize: int) -> tuple[int, int]:
    return (64, 64) if itemsize == 4 else (64, 128)


def _usual_block_k(itemsize: int) -> int:
    return 64 if itemsize == 4 else 128


_MOST_SPLIT = 8
