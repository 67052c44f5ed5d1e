"""The strategies that use the compiled kernels: from a packed copy, and from unpacked adapters in place."""

from __future__ import annotations

import array
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atmm.cpu import Library, library
from atmm.cpu.table import Rows, hidden_places, lane_table
from atmm.layers import Factors, Packed, Site, SiteGroup, check_reads, row_strides
from atmm.segments import BatchStats, Lane, Strategy
from atmm.strategies.shared_shrink import SharedShrink


class Compiled(SharedShrink):
    """The share of a site is the hidden values of its lanes, in a buffer of the group. Requires `serves`."""

    __slots__ = ("_hidden", "_lanes", "_num_tokens", "_shrink_lanes", "_signs")

    def __init__(self, stats: BatchStats) -> None:
        super().__init__(stats)
        layout = stats.layout
        self._num_tokens = stats.num_tokens
        a_stride, bt_strides = row_strides(layout)
        size_of = layout.dtype.itemsize
        parts = [
            (index, lane, span)
            for index in stats.live
            for lane in stats.lanes
            if (span := layout.spans[index].get(lane.key)) is not None and span.rank
        ]
        places, size = hidden_places((lane, span.rank) for _, lane, span in parts)
        shrunk: list[tuple[Lane, Rows, int]] = []
        expanded: dict[int, list[tuple[Lane, Rows, int]]] = {index: [] for index in stats.live}
        for (index, lane, span), place in zip(parts, places, strict=True):
            row, bt_stride = layout.first_rows[index] + span.start, bt_strides[index]
            shrunk.append((lane, Rows(row * a_stride * size_of, a_stride, span.rank), place))
            expanded[index].append((lane, Rows(span.start * bt_stride * size_of, bt_stride, span.rank), place))
        self._shrink_lanes = lane_table(shrunk, stats.start)
        self._lanes = {index: lane_table(own, stats.start) for index, own in expanded.items()}
        self._signs = torch.tensor([lane.sign for _, lane, _ in parts], dtype=torch.float32)
        self._hidden = torch.empty(size, dtype=torch.float32)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        assert packed is not None
        hidden = self._share(x, site.index, packed)
        if hidden is None:
            return
        if self._part is not None:
            y = y[self._part]
        bt, lanes = packed.bts[site.index], self._lanes[site.index]
        _kernels().expand[y.dtype](
            y.data_ptr(), y.stride(0), y.stride(1), hidden.data_ptr(), bt.data_ptr(), lanes.data_ptr(), lanes.shape[0],
            self._num_tokens, y.shape[1],
        )  # fmt: skip

    def _compute(self, x: Tensor, packed: Packed) -> dict[int, Tensor]:
        if self._part is not None:
            x = x[self._part]
        a, lanes, hidden = packed.a, self._shrink_lanes, self._hidden
        _kernels().shrink[x.dtype](
            hidden.data_ptr(), x.data_ptr(), x.stride(0), x.stride(1), a.data_ptr(), lanes.data_ptr(),
            self._signs.data_ptr(), lanes.shape[0], self._num_tokens, x.shape[1],
        )  # fmt: skip
        return dict.fromkeys(self._lanes, hidden)


class Scattered(Strategy):
    """`Compiled` from the sites' own factors: an adapter is usable as soon as it is loaded, without a packed copy.

    Requires `serves`. One object serves every site of a plan, and one call serves a group. Preparation is cheap, one
    address per lane and site, because the lanes change between steps.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._start = min((lane.start for lane in lanes), default=0)
        self._stop = max((lane.stop for lane in lanes), default=0)
        self._keys = tuple(lane.key for lane in lanes)
        numbers = itertools.chain.from_iterable(
            (lane.start - self._start, lane.stop - lane.start, int(lane.sign)) for lane in lanes
        )
        self._spans = array.array("q", numbers)
        self._tables: dict[Site | SiteGroup, _Tables] = {}

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        self._add(y, x, site, (site,))

    def add_all(self, y: Tensor, x: Tensor, group: SiteGroup) -> None:
        """Add all sites of the group. y: [T, sum of d_out], the sites' outputs side by side."""
        self._add(y, x, group, group.sites)

    def _add(self, y: Tensor, x: Tensor, owner: Site | SiteGroup, sites: Sequence[Site]) -> None:
        tables = self._tables.get(owner)
        if tables is None or not all(map(operator.is_, self._factors_of(sites), tables.read)):
            tables = self._tables_of(owner, sites, x)
        if not tables.num_sites:
            return
        x_token, x_feature = x.stride()
        y_token, y_feature = y.stride()
        skipped = self._start * x.element_size()
        _kernels().deltas[x.dtype](
            y.data_ptr() + skipped * y_token, y_token, y_feature, x.data_ptr() + skipped * x_token, x_token, x_feature,
            tables.address, tables.num_sites, self._spans.buffer_info()[0], len(self._keys), self._stop - self._start,
            x.shape[1],
        )  # fmt: skip

    def _factors_of(self, sites: Sequence[Site]) -> Iterator[Factors | None]:
        return itertools.chain.from_iterable(map(site.factors.get, self._keys) for site in sites)

    def _tables_of(self, owner: Site | SiteGroup, sites: Sequence[Site], x: Tensor) -> _Tables:
        kept: list[array.array[int] | Factors] = []
        numbers: list[int] = []
        lasts = True
        column = 0
        for site in sites:
            factors, copies = self._addresses(site, x)
            lasts = lasts and not copies
            if any(factors):
                addresses = array.array("q", factors)
                numbers += column, site.d_out, addresses.buffer_info()[0]
                kept += addresses, *copies
            column += site.d_out
        table = array.array("q", numbers)
        kept.append(table)
        made = _Tables(tuple(self._factors_of(sites)), table.buffer_info()[0], len(numbers) // 3, kept)
        if lasts:  # a copy would miss later writes to the factors
            self._tables[owner] = made
        return made

    def _addresses(self, site: Site, x: Tensor) -> tuple[list[int], list[Factors]]:
        """The address of every lane's factors, 0 without factors at this site; and copies of factors without contiguous
        rows."""
        kind = site.d_in, site.d_out, x.dtype, x.device
        addresses: list[int] = []
        copies: list[Factors] = []
        for key in self._keys:
            factors = site.factors.get(key)
            if factors is None:
                addresses.append(0)
                continue
            rows = factors.rows
            if rows is None or rows.kind != kind:
                check_reads(site, key, factors, x)
                copies.append(Factors(*(factor.contiguous() for factor in factors)))
                rows = copies[-1].rows
                assert rows is not None
            addresses.append(rows.address if rows.rank else 0)
        return addresses, copies


class _Tables(NamedTuple):
    """The arguments of `deltas` for some sites.

    read: the factors they were built from, None for absent ones. address: of the table of sites. kept: the objects that
    the table points to.
    """

    read: tuple[Factors | None, ...]
    address: int
    num_sites: int
    kept: list[array.array[int] | Factors]


def _kernels() -> Library:
    """Read at every call, because a `Tape` replaces them."""
    kernels = library()
    assert kernels is not None, "the compiled kernels are not available"
    return kernels


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled kernels support this device and type."""
    kernels = library() if device.type == "cpu" else None
    return kernels is not None and dtype in kernels.shrink
