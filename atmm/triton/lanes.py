"""The GPU strategies with the Triton kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atmm.batch_stats import BatchStats
from atmm.layers import ROW_ALIGNMENT, Packed, Site, SiteGroup
from atmm.places import Places, PlaceSource
from atmm.segments import SegmentPlan
from atmm.strategies.shared_shrink import CachedInput
from atmm.triton.handles import Handle, handle
from atmm.triton.plan import tiles_of
from atmm.triton.tiling import Tiling, block_r, shrink_programs, usual

# float32 products stay in float32: TF32 on tensor cores would change answers.
_PRECISION = "ieee"


def prepare(plan: SegmentPlan, stats: BatchStats, source: PlaceSource, tiling: Tiling | None = None) -> InPlace:
    """The strategy for a plan and a tiling; None uses the default tiling for the shape. source: the plan's adapters."""
    layout = stats.layout
    ranks = [span.rank for site in layout.spans for span in site.values()]
    lengths = [lane.stop - lane.start for lane in stats.lanes]
    num_sites = len(stats.live)
    if plan.room is not None:  # any adapter may get a lane later
        ranks = [plan.max_rank, *source.ranks.values()]
        lengths, num_sites = lengths or [1] * plan.num_tokens, len(layout.d_outs)
    highest = max((1, *ranks))
    rows = block_r(highest)
    rank_blocks = -(-highest // rows)
    if tiling is None:
        longest = max(lengths, default=1)
        programs = shrink_programs(lengths, num_sites, highest)
        tiling = usual(layout.dtype.itemsize, layout.d_in, longest, programs)
    blocks = Blocks(tiling, rows, rank_blocks * rows)
    return (Tiled if tiling.split_k else SingleLaunch)(plan, stats, source, blocks)


class Blocks(NamedTuple):
    """Sizes for which kernels are compiled.

    rows: of a factor, multiplied at a time. max_rank: upper bound of the ranks; a multiple of `rows`.
    """

    tiling: Tiling
    rows: int
    max_rank: int


class InPlace:
    """Base of strategies that read factors in place, through a table of places."""

    adds_transposed = False
    begin: Callable[[Tensor, Site, Packed | None], None] | None = None

    def __init__(self, plan: SegmentPlan, stats: BatchStats, source: PlaceSource, blocks: Blocks) -> None:
        tiling = blocks.tiling
        self._layout, self._source = stats.layout, source
        self._generation, self._max_rank = source.generation, blocks.max_rank
        self._tiles = tiles_of(plan, source, tiling.block_m, stats.layout.device)
        d_outs = stats.layout.d_outs
        self._live = frozenset(stats.live if plan.room is None else range(len(d_outs)))
        self._columns = tuple(sum(d_outs[:index]) for index in range(len(d_outs)))
        self._blocks = tuple(-(-d_out // tiling.block_n) for d_out in d_outs)
        divisors = (*d_outs, math.gcd(*d_outs))  # of each site, and of all sites at once
        *self._kernels, self._kernel_of_all = (self._writing(each, blocks) for each in divisors)

    def _writing(self, divisor: int, blocks: Blocks) -> Handle:
        """The kernel that writes outputs, for sites with a d_out divisible by `divisor`."""
        raise NotImplementedError

    def _handle(self, name: str, sizes: Iterable[tuple[str, Any]], **options: int) -> Handle:
        layout = self._layout
        common = ("LINE", ROW_ALIGNMENT // layout.dtype.itemsize), ("PRECISION", _PRECISION)
        return handle(name, layout.dtype, layout.device, (*sizes, *common), **options)

    def refill(self, plan: SegmentPlan) -> None:
        """Use the plan's current lanes, in the tables that were sized for its room.

        Raises:
            ValueError: an adapter has no slot or too high a rank, or the table of places has moved. Nothing is changed.
        """
        source = self._source
        if missing := sorted(plan.keys - source.slots.keys()):
            raise ValueError(
                f"lanes use adapters that are not packed or loaded: {', '.join(missing)}; add them and capture again"
            )
        highest = max((source.ranks[key] for key in plan.keys), default=0)
        if highest > self._max_rank:  # without a key, so that a caller can log each rank once
            raise ValueError(
                f"an adapter has rank {highest}, the captured kernels at most {self._max_rank}; capture again"
            )
        if source.generation != self._generation:
            raise ValueError("the table of places has moved to have more slots; capture again")
        self._tiles.replace(plan.lanes)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        if site.index in self._live:
            self._tiles.update()
            self._add(y, x, self._source.at(site, packed), site.index)

    def add_all(self, y: Tensor, x: Tensor, group: SiteGroup) -> None:
        """Add all sites of the group at once. y: [T, sum of d_out], the sites' outputs side by side."""
        self._tiles.update()
        self._add(y, x, self._source.at(group.sites[0], group.packed), None)

    def _add(self, y: Tensor, x: Tensor, places: Places, site: int | None) -> None:
        """Add to the outputs of one site, or of all sites if `site` is None."""
        raise NotImplementedError

    def _launch(self, site: int | None) -> tuple[Handle, tuple[int, int, int], int]:
        """Kernel, grid, and first column of a launch that writes outputs of one site or of all."""
        tiles = self._tiles.sizes.expand
        if site is None:
            return self._kernel_of_all, (tiles, max(self._blocks), len(self._blocks)), 0
        return self._kernels[site], (tiles, self._blocks[site], 1), self._columns[site]


class Tiled(InPlace):
    """Shrink and expand in one launch each. Sites called one by one share the shrink of the first, or of `begin`."""

    def __init__(self, plan: SegmentPlan, stats: BatchStats, source: PlaceSource, blocks: Blocks) -> None:
        super().__init__(plan, stats, source, blocks)
        tiling, rows, max_rank = blocks
        layout, sizes = stats.layout, self._tiles.sizes
        num_sites = len(layout.d_outs)
        self._shrink_programs = sizes.shrink, max_rank // rows * num_sites, tiling.split_k
        self._shrink_kernel = self._handle(
            "shrink",
            (
                ("BLOCK_M", tiling.block_m), ("BLOCK_R", rows), ("BLOCK_K", tiling.block_k), ("SITES", num_sites),
                ("EVEN_K", layout.d_in % (tiling.block_k * tiling.split_k) == 0),
            ),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )  # fmt: skip
        self._hidden = torch.empty(
            tiling.split_k, num_sites * sizes.hidden_rows, max_rank, dtype=torch.float32, device=layout.device
        )
        self._shrunk = CachedInput()  # the input of the hidden values, until every site has used them
        self._shrunk_places: Places | None = None
        self._unused: set[int] = set()
        self._branch = Branch(layout.device)

    def begin(self, x: Tensor, site: Site, packed: Packed | None) -> None:
        """Shrink x for all sites, beside the work that the caller launches next."""
        places = self._source.at(site, packed)
        if not self._is_shrunk(x, places, {site.index}):
            self._tiles.update()
            with self._branch.begun():
                self._shrink(x, places)

    def _writing(self, divisor: int, blocks: Blocks) -> Handle:
        tiling, rows, max_rank = blocks
        return self._handle(
            "expand",
            (
                ("BLOCK_M", tiling.block_m), ("BLOCK_N", tiling.block_n), ("BLOCK_R", rows),
                ("MAX_RANK", max_rank), ("PARTS", self._tiles.sizes.parts), ("PLANES", tiling.split_k),
                ("EVEN_N", divisor % tiling.block_n == 0),
            ),
            num_warps=tiling.num_warps,
        )  # fmt: skip

    def _add(self, y: Tensor, x: Tensor, places: Places, site: int | None) -> None:
        self._branch.join()
        sites = self._live if site is None else {site}
        if not self._is_shrunk(x, places, sites):
            self._shrink(x, places)
        self._unused -= sites
        if not self._unused:
            self._shrunk_places = None
            self._shrunk.clear()
        rows = self._tiles.sizes.hidden_rows
        hidden = self._hidden
        if site is not None:
            hidden, places = hidden[:, site * rows :], places.of_site(site)
        kernel, programs, column = self._launch(site)
        strides = y.stride(0), hidden.stride(0), hidden.stride(1), places.rows.stride(0)
        kernel(programs, (y, hidden, places.origin, places.rows), (column, *strides, rows), self._tiles.expand)

    def _is_shrunk(self, x: Tensor, places: Places, sites: Set[int]) -> bool:
        held = self._shrunk_places
        if held is None or held.origin is not places.origin or held.rows is not places.rows:
            return False
        return sites <= self._unused and self._shrunk.matches(x)

    def _shrink(self, x: Tensor, places: Places) -> None:
        self._unused = set(self._live)
        self._shrunk_places = places
        self._shrunk.set(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        hidden = self._hidden
        strides = x.stride(0), hidden.stride(0), hidden.stride(1), places.rows.stride(0)
        self._shrink_kernel(
            self._shrink_programs,
            (x, places.origin, hidden, places.rows),
            (x.shape[1], *strides, self._tiles.sizes.hidden_rows),
            self._tiles.shrink,
        )


class SingleLaunch(InPlace):
    """Shrink and expand in one launch per site, for few adapters and tokens, where launches cost more than
    arithmetic."""

    def _writing(self, divisor: int, blocks: Blocks) -> Handle:
        tiling, rows, max_rank = blocks
        return self._handle(
            "single",
            (
                ("BLOCK_M", tiling.block_m), ("BLOCK_N", tiling.block_n), ("BLOCK_K", tiling.block_k),
                ("BLOCK_R", rows), ("MAX_RANK", max_rank), ("PARTS", self._tiles.sizes.parts),
                ("EVEN_K", self._layout.d_in % tiling.block_k == 0), ("EVEN_N", divisor % tiling.block_n == 0),
            ),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )  # fmt: skip

    def _add(self, y: Tensor, x: Tensor, places: Places, site: int | None) -> None:
        if x.stride(1) != 1:
            x = x.contiguous()
        if site is not None:
            places = places.of_site(site)
        kernel, programs, column = self._launch(site)
        strides = y.stride(0), x.stride(0), places.rows.stride(0)
        kernel(programs, (y, x, places.origin, places.rows), (column, x.shape[1], *strides), self._tiles.expand)


class Branch:
    """Kernels that start after the caller's work so far and end before its work after `join`.

    In the capture of a CUDA graph they become a branch of the graph. On a CPU everything runs in order.
    """

    __slots__ = ("_device", "_open")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open = False

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Context in which kernels are launched on the branch. Memory that they use must be kept until `join`."""
        if self._device.type != "cuda":
            yield
            return
        stream = _stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        self._open = True
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Make later work of the current stream wait for the branch."""
        if self._open:
            torch.cuda.current_stream(self._device).wait_stream(_stream(self._device))
            self._open = False


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Of all branches of a device: they are used one after the other."""
    return torch.cuda.Stream(device)
