"""The GPU strategy with grouped products: one product per lane and site, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atmm.batch_stats import BatchStats
from atmm.cutlass import ARGUMENT_BYTES, library
from atmm.layers import Packed, Site, SiteGroup, bt_starts
from atmm.segments import Lane
from atmm.strategies.shared_shrink import SharedShrink

ALIGNMENT = 8  # elements of a 128-bit access: sizes, strides and starts are multiples of it


def serves(stats: BatchStats, name: str) -> bool:
    """Whether the tile with this name is built for this GPU and can compute this plan."""
    layout = stats.layout
    if layout.device.type != "cuda" or not legal(stats):
        return False
    kernels = library()
    return kernels is not None and (layout.dtype, name) in kernels.tiles


class _Launch(NamedTuple):
    """One expand launch: problems [first, first + num), the number of tiles, and their sign."""

    first: int
    num: int
    num_tiles: int
    sign: float


class Grouped(SharedShrink):
    """The share of a site is the hidden values of all lanes of the group, lane after lane. Requires `serves`.

    A group takes three launches: fill in the addresses of the layer's tensors, shrink, expand. Every further round adds
    one expand, which rounds y once more.
    """

    adds_transposed = False
    begin = None
    refill = None

    __slots__ = (
        "_all", "_arguments", "_by_site", "_columns", "_count", "_expand", "_hidden", "_point",
        "_problems", "_shrink", "_shrink_tiles",
    )  # fmt: skip

    def __init__(self, stats: BatchStats, name: str) -> None:
        super().__init__(stats)
        kernels, layout = library(), stats.layout
        assert kernels is not None, "the grouped products are not available"
        self._point = kernels.point
        tile, self._shrink, self._expand = kernels.tiles[layout.dtype, name]
        found = problems_of(stats)
        self._columns = tuple(sum(layout.d_outs[:site]) for site in range(len(layout.d_outs)))
        self._by_site: dict[int, list[_Launch]] = {site: [] for site in stats.live}
        self._all: list[_Launch] = []
        for sign, by_site in found.rounds:
            launches = []
            for site, (first, num) in by_site.items():
                num_tiles = sum(tile.num_tiles(p.num_tokens, p.d_out) for p in found.problems[first : first + num])
                launches.append(_Launch(first, num, num_tiles, sign))
                self._by_site[site].append(launches[-1])
            num, num_tiles = sum(launch.num for launch in launches), sum(launch.num_tiles for launch in launches)
            self._all.append(_Launch(launches[0].first, num, num_tiles, sign))
        self._shrink_tiles = sum(tile.num_tiles(p.num_tokens, p.rank) for p in found.problems)
        self._count = len(found.problems)
        self._problems = torch.tensor(found.problems, dtype=torch.int64).to(layout.device, non_blocking=True)
        self._arguments = torch.empty(ARGUMENT_BYTES * self._count, dtype=torch.uint8, device=layout.device)
        self._hidden = torch.empty(found.num_hidden, dtype=layout.dtype, device=layout.device)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        assert packed is not None
        if site.index in self._live:
            self._add(y, x, packed, self._by_site[site.index], site.index)

    def add_all(self, y: Tensor, x: Tensor, group: SiteGroup) -> None:
        """Add all sites of the group. y: [T, sum of d_out], the sites' outputs side by side."""
        assert group.packed is not None
        self._add(y, x, group.packed, self._all, None)

    def _add(self, y: Tensor, x: Tensor, packed: Packed, launches: Sequence[_Launch], site: int | None) -> None:
        """Add to the outputs of one site, or of all sites if `site` is None."""
        own = y if self._part is None else y[self._part]
        rows, inputs = _aligned(own), _aligned(x if self._part is None else x[self._part])
        stream = _stream(y.device)
        _check(self._point(
            self._problems.data_ptr(), self._count, self._arguments.data_ptr(), inputs.data_ptr(),
            inputs.stride(0), inputs.shape[1], packed.a.data_ptr(), self._hidden.data_ptr(),
            rows.data_ptr(), rows.stride(0), 0 if site is None else self._columns[site], stream,
        ))  # fmt: skip
        if site is None:
            self._shrink_all(stream)
        else:
            self._share(x, site, packed)
        arguments = self._arguments.data_ptr()
        for first, num, num_tiles, sign in launches:
            _check(self._expand(arguments, self._count, first, num, num_tiles, sign, stream))
        if rows is not own:
            own.copy_(rows)

    def _compute(self, x: Tensor, packed: Packed) -> dict[int, Tensor]:
        self._shrink_all(_stream(x.device))
        return dict.fromkeys(self._live, self._hidden)

    def _shrink_all(self, stream: int) -> None:
        _check(self._shrink(self._arguments.data_ptr(), self._count, self._shrink_tiles, stream))


def _aligned(rows: Tensor) -> Tensor:
    """The tensor itself, or a copy if its rows are not aligned to 128 bits."""
    if rows.stride(1) == 1 and rows.stride(0) % ALIGNMENT == 0 and rows.data_ptr() % (ALIGNMENT * rows.itemsize) == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"a grouped product could not be launched (status {status})")


# Lanes as problems of grouped products, built once per step and class. The device fills in the addresses of a layer's
# tensors (`problems.h`).


class Problem(NamedTuple):
    """One lane at one site, in elements; same fields in the same order as `Problem` in `problems.h`.

    token: first token, counted from the start of the plan's range. a, bt: offsets of its rows from the start of the
    packed A. column: first column in the group's outputs side by side. hidden: offset of its hidden values [num_tokens,
    rank].
    """

    token: int
    num_tokens: int
    rank: int
    d_out: int
    a: int
    bt: int
    column: int
    hidden: int


class Round(NamedTuple):
    """Problems that one launch may add to y: they have the same sign, and no token occurs twice at a site.

    by_site: index of the first problem and number of problems of each site; sites without problems are omitted.
    """

    sign: float
    by_site: dict[int, tuple[int, int]]


class Problems(NamedTuple):
    """problems: ordered by round, then site. num_hidden: total number of hidden values."""

    problems: list[Problem]
    rounds: list[Round]
    num_hidden: int


def legal(stats: BatchStats) -> bool:
    """Whether the products support the plan: 16-bit values, and sizes and offsets that are multiples of 128 bits."""
    layout = stats.layout
    if layout.dtype.itemsize != 2:
        return False
    ranks = {run.rank for site in stats.runs for run in site}
    return all(size % ALIGNMENT == 0 for size in (layout.d_in, *layout.d_outs, *ranks))


def problems_of(stats: BatchStats) -> Problems:
    layout = stats.layout
    starts = bt_starts(layout)
    problems: list[Problem] = []
    rounds = []
    num_hidden = 0
    for sign, lanes in _apart(stats.lanes):
        by_site = {}
        for site in stats.live:
            first = len(problems)
            for key, start, stop, _ in lanes:
                span = layout.spans[site].get(key)
                if span is None or not span.rank:
                    continue
                problems.append(
                    Problem(
                        token=start - stats.start,
                        num_tokens=stop - start,
                        rank=span.rank,
                        d_out=layout.d_outs[site],
                        a=(layout.first_rows[site] + span.start) * layout.d_in,
                        bt=starts[site] // layout.dtype.itemsize + span.start * layout.d_outs[site],
                        column=sum(layout.d_outs[:site]),
                        hidden=num_hidden,
                    )
                )
                num_hidden += (stop - start) * span.rank
            if len(problems) > first:
                by_site[site] = first, len(problems) - first
        if by_site:
            rounds.append(Round(sign, by_site))
    return Problems(problems, rounds, num_hidden)


def _apart(lanes: tuple[Lane, ...]) -> list[tuple[float, list[Lane]]]:
    """Lanes, sorted by start, in as few groups as possible, each with one sign and without overlaps."""
    groups: list[tuple[float, list[Lane]]] = []
    for lane in lanes:
        for sign, group in groups:
            if sign == lane.sign and group[-1].stop <= lane.start:
                group.append(lane)
                break
        else:
            groups.append((lane.sign, [lane]))
    return groups
