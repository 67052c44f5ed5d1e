"""The tile sizes of the grouped products: a dozen at most, all built ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Tile(NamedTuple):
    """Sizes of one tile.

    block_m: tokens. block_n: outputs. block_k: inputs multiplied at a time. num_stages: pipeline stages. warp_m,
    warp_n: one warp's part of the outputs, determined by the other sizes.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    warp_m: int
    warp_n: int

    @property
    def name(self) -> str:
        return f"grouped m{self.block_m} n{self.block_n} k{self.block_k} s{self.num_stages}"

    @property
    def symbol(self) -> str:
        return f"m{self.block_m}_n{self.block_n}_k{self.block_k}_s{self.num_stages}"

    def num_tiles(self, m: int, n: int) -> int:
        """Tiles of an output [m, n]."""
        return -(-m // self.block_m) * -(-n // self.block_n)


SPACE = (
    Tile(16, 64, 64, 4, 16, 32),
    Tile(32, 64, 64, 4, 16, 32),
    Tile(32, 128, 32, 4, 32, 32),
    Tile(64, 32, 64, 4, 16, 32),
    Tile(64, 64, 32, 5, 32, 32),
    Tile(64, 64, 64, 4, 32, 32),
    Tile(64, 128, 32, 4, 32, 64),
    Tile(64, 128, 64, 3, 32, 64),
    Tile(128, 32, 64, 4, 32, 32),
    Tile(128, 64, 32, 4, 64, 32),
    Tile(128, 64, 64, 3, 64, 32),
    Tile(128, 128, 32, 4, 64, 64),
)
"""Tiles with a CUTLASS epilogue that compile without spilling for compute capability 8.0 and 9.0."""


def sensible(longest: int) -> Iterator[Tile]:
    """The tiles worth timing for lanes of at most `longest` tokens: all but those that would be mostly empty."""
    for tile in SPACE:
        if tile.block_m == min(tile.block_m for tile in SPACE) or tile.block_m < 2 * longest:
            yield tile
