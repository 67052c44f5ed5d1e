"""The GPU strategies with the Triton kernels."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atmm.layers import ROW_ALIGNMENT, Packed, Site, SiteGroup
from atmm.places import Places, PlaceSource
from atmm.segments import MOST_WITH_ROOM, BatchStats, Lane, SegmentPlan, Strategy, check_not_capturing
from atmm.strategies.shared_shrink import CachedInput
from atmm.triton.handles import Handle, handle, multiprocessors
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
        tiling = usual(layout.dtype.itemsize, layout.d_in, longest, programs, multiprocessors(layout.device))
    blocks = Blocks(tiling, rows, rank_blocks * rows)
    return (Tiled if tiling.split_k else SingleLaunch)(plan, stats, source, blocks)


class Blocks(NamedTuple):
    """Sizes for which kernels are compiled.

    rows: of a factor, multiplied at a time. max_rank: upper bound of the ranks; a multiple of `rows`.
    """

    tiling: Tiling
    rows: int
    max_rank: int


class InPlace(Strategy):
    """Base of strategies that read factors in place, through a table of places."""

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


SHRINK_FIELDS = 4
_WHOLE = 16  # hidden rows of a site are a multiple of this, so that strides are multiples of 16


class Sizes(NamedTuple):
    """Sizes of a tile table.

    shrink, expand: number of tiles. parts: maximum number of lanes per token. hidden_rows: hidden values of one site.
    """

    shrink: int
    expand: int
    parts: int
    hidden_rows: int


class TileTable:
    """The tiles of a plan's lanes, on the device.

    shrink: [first token, tokens, slot, first hidden row] per tile.

    expand: [first token, tokens, (slot, first hidden row, sign) x parts] per tile; tiles cover disjoint tokens. A part
    that is not used has sign 0.

    For a plan with room, all sizes are the maximum for any lanes, and tiles of zeros pad the tables.
    """

    __slots__ = (
        "_block", "_lanes", "_num_tokens", "_room", "_source", "_table", "_version", "expand", "shrink", "sizes",
    )  # fmt: skip

    def __init__(self, plan: SegmentPlan, source: PlaceSource, block: int, device: torch.device) -> None:
        self._block, self._source = block, source
        self._num_tokens, self._room = plan.num_tokens, plan.room
        self._lanes, self._version = plan.lanes, source.version
        shrink, expand, self.sizes = self._split()
        self._table = _staged(shrink, expand, device).to(device, non_blocking=True)
        self.shrink, self.expand = self._table[: shrink.size], self._table[shrink.size :]

    def replace(self, lanes: tuple[Lane, ...]) -> None:
        """Use other lanes, at the same addresses. Only for a plan with room."""
        if lanes != self._lanes:
            self._lanes, self._version = lanes, -1
        self.update()

    def update(self) -> None:
        """Write the tiles again if adapters have other slots now."""
        if self._version == self._source.version:
            return
        check_not_capturing(self._table.device)
        shrink, expand, _ = self._split()
        self._table.copy_(_staged(shrink, expand, self._table.device), non_blocking=True)
        self._version = self._source.version

    def _split(self) -> tuple[np.ndarray, np.ndarray, Sizes]:
        """The tiles, int32 [tiles, fields] each."""
        lanes, slots, block = self._lanes, self._source.slots, self._block
        shrink: list[tuple[int, ...]] = []
        starts: list[int] = []  # by lane, the hidden row of its first token
        num_rows = 0
        for key, start, stop, _ in lanes:
            slot = slots[key]
            for token in range(start, stop, block):
                shrink.append((token, min(block, stop - token), slot, num_rows + token - start))
            starts.append(num_rows)
            num_rows += stop - start
        pieces = _pieces(lanes)
        parts = max((len(own) for _, _, own in pieces), default=1)
        if self._room is not None:
            parts, num_rows = MOST_WITH_ROOM, MOST_WITH_ROOM * self._num_tokens
        expand: list[tuple[int, ...]] = []
        for first, last, own in pieces:
            for token in range(first, last, block):
                row = [token, min(block, last - token)]
                for index in own:
                    key, start, _, sign = lanes[index]
                    row += [slots[key], starts[index] + token - start, int(sign)]
                expand.append((*row, *(row[2], 0, 0) * (parts - len(own))))
        num_shrink, num_expand = len(shrink), len(expand)
        if self._room is not None:
            # The last tile of a lane may be short, and so may the tile before each boundary of a lane.
            num_shrink = min(num_rows, num_rows // block + self._room)
            num_expand = min(self._num_tokens, self._num_tokens // block + 2 * self._room)
        sizes = Sizes(num_shrink, num_expand, parts, -(-num_rows // _WHOLE) * _WHOLE)
        return _padded(shrink, num_shrink, SHRINK_FIELDS), _padded(expand, num_expand, 2 + 3 * parts), sizes


def tiles_of(plan: SegmentPlan, source: PlaceSource, block: int, device: torch.device) -> TileTable:
    """The plan's tiles of at most `block` tokens; all classes of sites with the same source share them."""
    key = source, block
    tiles = plan.shared.get(key)
    if tiles is None:
        tiles = plan.shared[key] = TileTable(plan, source, block, device)
    assert isinstance(tiles, TileTable)
    return tiles


def _pieces(lanes: Sequence[Lane]) -> list[tuple[int, int, list[int]]]:
    """The maximal token ranges covered by the same lanes, with the indices of these lanes. lanes: sorted by start."""
    borders = sorted({border for lane in lanes for border in (lane.start, lane.stop)})
    found: list[tuple[int, int, list[int]]] = []
    here: list[int] = []
    following = 0
    for start, stop in itertools.pairwise(borders):
        here = [index for index in here if lanes[index].stop > start]
        while following < len(lanes) and lanes[following].start == start:
            here.append(following)
            following += 1
        if here:
            found.append((start, stop, here))
    return found


def _padded(tiles: Sequence[tuple[int, ...]], count: int, fields: int) -> np.ndarray:
    table = np.zeros((count, fields), dtype=np.int32)
    if tiles:
        table[: len(tiles)] = tiles
    return table


def _staged(shrink: np.ndarray, expand: np.ndarray, device: torch.device) -> torch.Tensor:
    """Both tables in one host array, so that one copy moves them to the device."""
    values = torch.from_numpy(np.concatenate([shrink.reshape(-1), expand.reshape(-1)]))
    return values.pin_memory() if device.type == "cuda" else values  # torch keeps it until the copy is done
