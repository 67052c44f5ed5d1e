"""The strategy that runs on a GPU through the Triton kernels, and merging through them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atmm.shares import GroupShares
from atmm.sites import ROW_ALIGNMENT, Layout, Packed, Site
from atmm.survey import Survey
from atmm.tiled import kernels
from atmm.tiled.plan import Tiles, cut
from atmm.tiled.tiling import Tiling, block_r, usual

# float32 products stay float32: tensor cores' shorter formats would change answers.
_PRECISION = "ieee"


def prepare(survey: Survey, tiling: Tiling | None = None) -> Tiled | SingleLaunch:
    """The strategy of a tiling; None takes the usual one for the shape."""
    layout = survey.layout
    highest = max((span.rank for site in layout.spans for span in site.values()), default=1)
    rows = block_r(highest)
    rank_blocks = -(-highest // rows)
    if tiling is None:
        longest = max((lane.stop - lane.start for lane in survey.lanes), default=1)
        num_tiles = sum(-(-(lane.stop - lane.start) // 64) for lane in survey.lanes) * len(survey.live)
        tiling = usual(layout.dtype.itemsize, layout.d_in, longest, num_tiles * rank_blocks)
    return (Tiled if tiling.split_k else SingleLaunch)(survey, tiling, rows, rank_blocks * rows)


class Tiled(GroupShares):
    """Share of a site: hidden values of all lanes of the group, float32 [planes, rows, width].

    block_r: rows of a factor multiplied at a time. max_rank: no rank is higher; a multiple of block_r.
    """

    adds_transposed = False

    __slots__ = ("_block_r", "_expand_tiles", "_hidden", "_max_rank", "_parts", "_shrink_tiles", "_tiling")

    def __init__(self, survey: Survey, tiling: Tiling, block_r: int, max_rank: int) -> None:
        super().__init__(survey)
        layout = survey.layout
        self._tiling, self._block_r, self._max_rank = tiling, block_r, max_rank
        tiles = cut(survey, tiling.block_m)
        self._parts = tiles.parts
        flat, counts = _on_device([tiles.shrink, *tiles.expand.values()], layout.device)
        self._shrink_tiles = flat, counts[0]
        self._expand_tiles = _ExpandTiles(flat[5 * counts[0] :], tiles, counts[1:], layout)
        self._hidden = torch.empty(tiling.split_k, tiles.num_rows, max_rank, dtype=torch.float32, device=layout.device)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        assert packed is not None
        hidden = self._share(x, site.index, packed)
        if hidden is not None:
            self._expand(y, hidden, packed, self._expand_tiles.of(site.index))

    def add_all(self, y: Tensor, x: Tensor, packed: Packed) -> None:
        """Two launches for the whole group. y: [T, sum of d_out], the sites' outputs side by side."""
        self._expand(y, self._shrink(x, packed), packed, self._expand_tiles.all)

    def _expand(self, y: Tensor, hidden: Tensor, packed: Packed, tiles: _Launch) -> None:
        if self._part is not None:
            y = y[self._part]
        tiling = self._tiling
        kernels.expand[(tiles.num_tiles, -(-tiles.widest // tiling.block_n))](
            y, hidden, packed.a, tiles.table, tiles.column, y.stride(0), hidden.stride(0), hidden.stride(1),
            BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_R=self._block_r, MAX_RANK=self._max_rank,
            PARTS=self._parts, PLANES=tiling.split_k, EVEN_N=tiles.divisor % tiling.block_n == 0,
            LINE=ROW_ALIGNMENT // y.element_size(), PRECISION=_PRECISION, num_warps=tiling.num_warps,
        )  # fmt: skip

    def _compute(self, x: Tensor, packed: Packed) -> dict[int, Tensor]:
        return dict.fromkeys(self._live, self._shrink(x, packed))

    def _shrink(self, x: Tensor, packed: Packed) -> Tensor:
        if self._part is not None:
            x = x[self._part]
        if x.stride(1) != 1:
            x = x.contiguous()
        table, count = self._shrink_tiles
        hidden, a, d_in, tiling = self._hidden, packed.a, x.shape[1], self._tiling
        kernels.shrink[(count, self._max_rank // self._block_r, tiling.split_k)](
            x, a, hidden, table, d_in, x.stride(0), a.stride(0), hidden.stride(0), hidden.stride(1),
            BLOCK_M=tiling.block_m, BLOCK_R=self._block_r, BLOCK_K=tiling.block_k,
            EVEN_K=d_in % (tiling.block_k * tiling.split_k) == 0, PRECISION=_PRECISION,
            num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        )  # fmt: skip
        return hidden


class SingleLaunch:
    """Shrink and expand in one launch per site, for a few adapters and tokens: there launches cost more than
    arithmetic."""

    adds_transposed = False

    __slots__ = ("_block_r", "_expand_tiles", "_live", "_max_rank", "_part", "_parts", "_tiling")

    def __init__(self, survey: Survey, tiling: Tiling, block_r: int, max_rank: int) -> None:
        self._part, self._live = survey.part, survey.live
        self._tiling, self._block_r, self._max_rank = tiling, block_r, max_rank
        tiles = cut(survey, tiling.block_m)
        self._parts = tiles.parts
        flat, counts = _on_device(list(tiles.expand.values()), survey.layout.device)
        self._expand_tiles = _ExpandTiles(flat, tiles, counts, survey.layout)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        assert packed is not None
        if site.index in self._live:
            self._launch(y, x, packed, self._expand_tiles.of(site.index))

    def add_all(self, y: Tensor, x: Tensor, packed: Packed) -> None:
        """One launch for the whole group. y: [T, sum of d_out], the sites' outputs side by side."""
        self._launch(y, x, packed, self._expand_tiles.all)

    def _launch(self, y: Tensor, x: Tensor, packed: Packed, tiles: _Launch) -> None:
        if self._part is not None:
            x, y = x[self._part], y[self._part]
        if x.stride(1) != 1:
            x = x.contiguous()
        a, d_in, tiling = packed.a, x.shape[1], self._tiling
        kernels.single[(tiles.num_tiles, -(-tiles.widest // tiling.block_n))](
            y, x, a, tiles.table, tiles.column, d_in, y.stride(0), x.stride(0), a.stride(0),
            BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, BLOCK_R=self._block_r,
            MAX_RANK=self._max_rank, PARTS=self._parts, EVEN_K=d_in % tiling.block_k == 0,
            EVEN_N=tiles.divisor % tiling.block_n == 0, LINE=ROW_ALIGNMENT // y.element_size(), PRECISION=_PRECISION,
            num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        )  # fmt: skip


class _Launch(NamedTuple):
    """What one launch of `expand` or `single` works on. column: of the group's outputs, the first in its y. widest: the
    largest d_out. divisor: every d_out is a multiple of it."""

    table: Tensor
    num_tiles: int
    column: int
    widest: int
    divisor: int


class _ExpandTiles:
    """A group's tiles on the device: a site's own, and all of them. counts: tiles of each site in `tiles.expand`."""

    __slots__ = ("_by_site", "all")

    def __init__(self, flat: Tensor, tiles: Tiles, counts: Sequence[int], layout: Layout) -> None:
        self._by_site: dict[int, _Launch] = {}
        size, first = 6 + 5 * tiles.parts, 0
        for site, count in zip(tiles.expand, counts, strict=True):
            d_out = layout.d_outs[site]
            self._by_site[site] = _Launch(flat[size * first :], count, sum(layout.d_outs[:site]), d_out, d_out)
            first += count
        d_outs = [layout.d_outs[site] for site in tiles.expand]
        self.all = _Launch(flat, first, 0, max(d_outs, default=0), math.gcd(*layout.d_outs))

    def of(self, site: int) -> _Launch:
        return self._by_site[site]


def _on_device(tables: Sequence[Sequence[tuple[int, ...]]], device: torch.device) -> tuple[Tensor, list[int]]:
    """Tables of tiles, one behind the other in one copy to the device, and the number of tiles of each."""
    flat = torch.tensor([value for table in tables for tile in table for value in tile], dtype=torch.int32)
    return flat.to(device, non_blocking=True), [len(table) for table in tables]


def merge(out: Tensor, base: Tensor, a: Tensor, bt: Tensor, scale: float) -> None:
    """As `atmm.merge`, for tensors whose last dimension is contiguous; one launch for all layers."""
    n, d_out, d_in = base.shape
    rank = a.shape[1]
    rows = block_r(rank)
    block_n, block_k = 64, 128
    kernels.merge[(n, -(-d_out // block_n), -(-d_in // block_k))](
        out, base, a, bt, scale, rank, d_out, d_in,
        out.stride(0), out.stride(1), base.stride(0), base.stride(1),
        a.stride(0), a.stride(1), bt.stride(0), bt.stride(1),
        BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_R=rows, MAX_RANK=-(-rank // rows) * rows,
        EVEN=d_out % block_n == 0 and d_in % block_k == 0, PRECISION=_PRECISION,
    )  # fmt: skip
