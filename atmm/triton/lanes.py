"""The GPU strategies with the Triton kernels, and merge with a Triton kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atmm.batch_stats import BatchStats
from atmm.layers import ROW_ALIGNMENT, Layout, Packed, Site, SiteGroup
from atmm.segments import SegmentPlan
from atmm.strategies.shared_shrink import SharedShrink
from atmm.triton.handles import Handle, handle
from atmm.triton.plan import Tiles, split_lanes
from atmm.triton.tiling import Tiling, block_r, merge_blocks, shrink_programs, usual

# float32 products stay in float32: TF32 on tensor cores would change answers.
_PRECISION = "ieee"


def prepare(stats: BatchStats, tiling: Tiling | None = None) -> Tiled | SingleLaunch:
    """The strategy for a tiling; None uses the default tiling for the shape."""
    layout = stats.layout
    highest = max((span.rank for site in layout.spans for span in site.values()), default=1)
    rows = block_r(highest)
    rank_blocks = -(-highest // rows)
    if tiling is None:
        longest = max((lane.stop - lane.start for lane in stats.lanes), default=1)
        programs = shrink_programs((lane.stop - lane.start for lane in stats.lanes), len(stats.live), highest)
        tiling = usual(layout.dtype.itemsize, layout.d_in, longest, programs)
    return (Tiled if tiling.split_k else SingleLaunch)(stats, tiling, rows, rank_blocks * rows)


class Tiled(SharedShrink):
    """The share of a site is the hidden values of all lanes of the group, float32 [planes, rows, width].

    block_r: rows of a factor multiplied at a time. max_rank: upper bound of the ranks; a multiple of block_r.
    """

    adds_transposed = False

    __slots__ = ("_block_m", "_expand_tiles", "_hidden", "_kernel", "_shrink_programs", "_shrink_table")

    def __init__(self, stats: BatchStats, tiling: Tiling, block_r: int, max_rank: int) -> None:
        super().__init__(stats)
        layout = stats.layout
        tiles = split_lanes(stats, tiling.block_m)
        self._block_m = tiling.block_m
        flat = _flat([tiles.shrink, *tiles.expand.values()]).to(layout.device, non_blocking=True)
        self._shrink_table = flat
        self._shrink_programs = len(tiles.shrink), max_rank // block_r, tiling.split_k
        block_k = tiling.block_k
        self._kernel = handle(
            "shrink",
            layout.dtype,
            layout.device,
            (
                ("BLOCK_M", tiling.block_m), ("BLOCK_R", block_r), ("BLOCK_K", block_k),
                ("EVEN_K", layout.d_in % (block_k * tiling.split_k) == 0), ("PRECISION", _PRECISION),
            ),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )  # fmt: skip

        def expand(divisor: int) -> Handle:
            return handle(
                "expand",
                layout.dtype,
                layout.device,
                (
                    ("BLOCK_M", tiling.block_m), ("BLOCK_N", tiling.block_n), ("BLOCK_R", block_r),
                    ("MAX_RANK", max_rank), ("PARTS", tiles.parts), ("PLANES", tiling.split_k),
                    ("EVEN_N", divisor % tiling.block_n == 0), ("LINE", ROW_ALIGNMENT // layout.dtype.itemsize),
                    ("PRECISION", _PRECISION),
                ),
                num_warps=tiling.num_warps,
            )  # fmt: skip

        self._expand_tiles = _ExpandTiles(flat[5 * len(tiles.shrink) :], tiles, layout, tiling.block_n, expand)
        self._hidden = torch.empty(tiling.split_k, tiles.num_rows, max_rank, dtype=torch.float32, device=layout.device)

    def refill(self, plan: SegmentPlan, layout: Layout) -> None:
        """Write the current lanes into the tables that were sized for the plan's room."""
        tiles = split_lanes(BatchStats(plan, layout), self._block_m)
        self._shrink_table.copy_(_flat([tiles.shrink, *tiles.expand.values()]), non_blocking=True)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        assert packed is not None
        hidden = self._share(x, site.index, packed)
        if hidden is not None:
            self._expand(y, hidden, packed, self._expand_tiles.of(site.index))

    def add_all(self, y: Tensor, x: Tensor, group: SiteGroup) -> None:
        """Two launches for the whole group. y: [T, sum of d_out], the sites' outputs side by side."""
        assert group.packed is not None
        self._expand(y, self._shrink(x, group.packed), group.packed, self._expand_tiles.all)

    def _expand(self, y: Tensor, hidden: Tensor, packed: Packed, tiles: _Launch) -> None:
        if self._part is not None:
            y = y[self._part]
        strides = y.stride(0), hidden.stride(0), hidden.stride(1)
        tiles.kernel(tiles.programs, (y, hidden, packed.a), (tiles.column, *strides), tiles.table)

    def _compute(self, x: Tensor, packed: Packed) -> dict[int, Tensor]:
        return dict.fromkeys(self._live, self._shrink(x, packed))

    def _shrink(self, x: Tensor, packed: Packed) -> Tensor:
        if self._part is not None:
            x = x[self._part]
        if x.stride(1) != 1:
            x = x.contiguous()
        hidden, a = self._hidden, packed.a
        strides = x.stride(0), a.stride(0), hidden.stride(0), hidden.stride(1)
        self._kernel(self._shrink_programs, (x, a, hidden), (x.shape[1], *strides), self._shrink_table)
        return hidden


class SingleLaunch:
    """Shrink and expand in one launch per site, for few adapters and tokens, where launches cost more than
    arithmetic."""

    adds_transposed = False

    __slots__ = ("_block_m", "_expand_tiles", "_live", "_part", "_table")

    def __init__(self, stats: BatchStats, tiling: Tiling, block_r: int, max_rank: int) -> None:
        self._part, self._live = stats.part, stats.live
        layout = stats.layout
        tiles = split_lanes(stats, tiling.block_m)
        self._block_m = tiling.block_m
        self._table = _flat(list(tiles.expand.values())).to(layout.device, non_blocking=True)

        def single(divisor: int) -> Handle:
            return handle(
                "single",
                layout.dtype,
                layout.device,
                (
                    ("BLOCK_M", tiling.block_m), ("BLOCK_N", tiling.block_n), ("BLOCK_K", tiling.block_k),
                    ("BLOCK_R", block_r), ("MAX_RANK", max_rank), ("PARTS", tiles.parts),
                    ("EVEN_K", layout.d_in % tiling.block_k == 0), ("EVEN_N", divisor % tiling.block_n == 0),
                    ("LINE", ROW_ALIGNMENT // layout.dtype.itemsize), ("PRECISION", _PRECISION),
                ),
                num_warps=tiling.num_warps,
                num_stages=tiling.num_stages,
            )  # fmt: skip

        self._expand_tiles = _ExpandTiles(self._table, tiles, layout, tiling.block_n, single)

    def refill(self, plan: SegmentPlan, layout: Layout) -> None:
        """Write the current lanes into the tables that were sized for the plan's room."""
        tiles = split_lanes(BatchStats(plan, layout), self._block_m)
        self._table.copy_(_flat(list(tiles.expand.values())), non_blocking=True)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        assert packed is not None
        if site.index in self._live:
            self._launch(y, x, packed, self._expand_tiles.of(site.index))

    def add_all(self, y: Tensor, x: Tensor, group: SiteGroup) -> None:
        """One launch for the whole group. y: [T, sum of d_out], the sites' outputs side by side."""
        assert group.packed is not None
        self._launch(y, x, group.packed, self._expand_tiles.all)

    def _launch(self, y: Tensor, x: Tensor, packed: Packed, tiles: _Launch) -> None:
        if self._part is not None:
            x, y = x[self._part], y[self._part]
        if x.stride(1) != 1:
            x = x.contiguous()
        a = packed.a
        strides = y.stride(0), x.stride(0), a.stride(0)
        tiles.kernel(tiles.programs, (y, x, a), (tiles.column, x.shape[1], *strides), tiles.table)


class _Launch(NamedTuple):
    """One launch of `expand` or `single`.

    table: its tiles. programs: tiles, then blocks of outputs of the widest site. column: the column of the group's
    outputs at which y starts.
    """

    kernel: Handle
    table: Tensor
    programs: tuple[int, int, int]
    column: int


class _ExpandTiles:
    """A group's launches: one per site, and one for all sites.

    flat: the tables of `tiles.expand`, concatenated. kernel_for: returns the kernel for sites with a d_out divisible by
    a number.
    """

    __slots__ = ("_by_site", "all")

    def __init__(
        self,
        flat: Tensor,
        tiles: Tiles,
        layout: Layout,
        block_n: int,
        kernel_for: Callable[[int], Handle],
    ) -> None:
        self._by_site: dict[int, _Launch] = {}
        size, first = 6 + 5 * tiles.parts, 0
        for site, own in tiles.expand.items():
            d_out = layout.d_outs[site]
            programs = len(own), -(-d_out // block_n), 1
            column = sum(layout.d_outs[:site])
            self._by_site[site] = _Launch(kernel_for(d_out), flat[size * first :], programs, column)
            first += len(own)
        widest = max((layout.d_outs[site] for site in tiles.expand), default=0)
        self.all = _Launch(kernel_for(math.gcd(*layout.d_outs)), flat, (first, -(-widest // block_n), 1), 0)

    def of(self, site: int) -> _Launch:
        return self._by_site[site]


def _flat(tables: Sequence[Sequence[tuple[int, ...]]]) -> Tensor:
    """Concatenated tables of tiles, so that one copy moves them to the device."""
    return torch.tensor([value for table in tables for tile in table for value in tile], dtype=torch.int32)


def merge(out: Tensor, base: Tensor, a: Tensor, bt: Tensor, scale: float) -> None:
    """`atmm.merge` for tensors with a contiguous last dimension; one launch for all layers."""
    n, d_out, d_in = base.shape
    rank = a.shape[1]
    rows = block_r(rank)
    block_n, block_k = merge_blocks(out.dtype.itemsize)
    kernel = handle(
        "merge",
        out.dtype,
        out.device,
        (
            ("BLOCK_N", block_n), ("BLOCK_K", block_k), ("BLOCK_R", rows), ("MAX_RANK", -(-rank // rows) * rows),
            ("EVEN", d_out % block_n == 0 and d_in % block_k == 0), ("PRECISION", _PRECISION),
        ),
    )  # fmt: skip
    strides = [stride for tensor in (out, base, a, bt) for stride in tensor.stride()[:2]]
    kernel(
        (n, -(-d_out // block_n), -(-d_in // block_k)), (out, base, a, bt), (rank, d_out, d_in, *strides), float(scale)
    )
