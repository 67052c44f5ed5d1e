"""Strategies to add the deltas. All compute the same result; `atmm.dispatch` selects the fastest for a shape.

A strategy is prepared once per plan and class of sites, then called at every site of the class: `strategy(y, x, site,
packed)` adds to y [T, d_out] in place; x is [T, d_in], `packed` is the packed copy of the site's group.

loop      two products per lane. Needs no packed copy. For few, long or uneven segments of high rank.
batched   two batched products per run of equal lanes, on views of the packed copy, without padding of ranks or tokens
          and without gathering. For many equal segments of high rank.
stacked   one shrink of all tokens with all packed adapters of all sites of the group; values of a token with an
          adapter it does not use are cleared. One expand per site. Redundant arithmetic, few calls: for a small sum of
          ranks.
gathered  the same shrink; the columns of each token's own adapters are gathered and weight its rows of Bt in an
          embedding bag. No redundant arithmetic in the expand, and rows are read in memory order. For decoding.
tiled     Triton kernels on a GPU: tiles of tokens against the rows of their adapter, read in place from a factor table
          or a packed copy; overlapping lanes are summed in registers. Tile sizes that a search has chosen follow the
          name.
compiled  on a CPU with a compiler: each token reads only its own rows in both products, and calls are cheap. For
          decoding, where it is bound by the bytes of the adapters.
divided   on a CPU with a compiler: short lanes by the compiled kernels and long lanes by two products, both from the
          sites' own factors. For batches with prefill and decode. Needs no packed copy.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from atmm.cpu.lanes import Compiled, serves
from atmm.layers import Layout, Packed, Site
from atmm.places import PackedPlaces, PlaceSource
from atmm.segments import BatchStats, SegmentPlan, Strategy
from atmm.strategies.hybrid import Loop, divided
from atmm.strategies.shared_shrink import SharedShrink


class Batched(Strategy):
    """One `bmm` and one `baddbmm_` per run of equal lanes."""

    def __init__(self, stats: BatchStats) -> None:
        self._first_rows = stats.layout.first_rows
        self._runs = stats.runs

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        assert packed is not None
        first_row = self._first_rows[site.index]
        bt = packed.bts[site.index]
        for start, num_lanes, length, row, rank, sign in self._runs[site.index]:
            num_tokens, num_rows = num_lanes * length, num_lanes * rank
            y_run = y[start : start + num_tokens]
            x_run = x[start : start + num_tokens]
            a_run = packed.a[first_row + row : first_row + row + num_rows]
            bt_run = bt[row : row + num_rows]
            if num_lanes == 1:
                y_run.addmm_(F.linear(x_run, a_run), bt_run, alpha=sign)
            else:
                a_run = a_run.view(num_lanes, rank, -1).transpose(1, 2)
                hidden = torch.bmm(x_run.view(num_lanes, length, -1), a_run)
                y_run.view(num_lanes, length, -1).baddbmm_(hidden, bt_run.view(num_lanes, rank, -1), alpha=sign)


class Stacked(SharedShrink):
    """The share of a site is its columns of the masked shrink."""

    __slots__ = ("_alpha", "_bits", "_columns", "_keep", "_signs")

    def __init__(self, stats: BatchStats) -> None:
        super().__init__(stats)
        layout = stats.layout
        self._columns = [
            (index, layout.first_rows[index], layout.first_rows[index] + layout.widths[index]) for index in stats.live
        ]
        signs, distinct = _signs(stats)
        kept = signs != 0
        self._alpha = distinct[0] if len(distinct) == 1 else 1.0
        self._bits = _BITS[layout.dtype.itemsize]
        self._keep = None if kept.all() else kept.to(self._bits).neg_().to(layout.device)
        self._signs = signs.to(layout.device, layout.dtype) if len(distinct) > 1 else None

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        assert packed is not None
        share = self._share(x, site.index, packed)
        if share is None:
            return
        if self._part is not None:
            y = y[self._part]
        y.addmm_(share, packed.bts[site.index], alpha=self._alpha)

    def _compute(self, x: Tensor, packed: Packed) -> dict[int, Tensor]:
        if self._part is not None:
            x = x[self._part]
        hidden = F.linear(x, packed.a)
        if self._keep is not None:
            # Clear bits instead of multiplying by zero: if another adapter overflows, the product would be NaN.
            hidden.view(self._bits).bitwise_and_(self._keep)
        if self._signs is not None:
            hidden.mul_(self._signs)
        if self._lone:
            return {0: hidden}
        return {index: hidden[:, first:stop] for index, first, stop in self._columns}


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signs(stats: BatchStats) -> tuple[Tensor, list[float]]:
    """Signs [tokens of the range, rows of the layout], and the distinct nonzero signs.

    A sign is the sum over the lanes of that token and adapter; 0 if there is none.
    """
    keys = {key: place for place, key in enumerate(stats.keys)}
    by_key = torch.zeros(stats.num_tokens, len(keys) + 1)  # last column: packed adapters without a lane
    for key, start, stop, sign in stats.lanes:
        by_key[start - stats.start : stop - stats.start, keys[key]] += sign
    columns: list[int] = []
    for site in stats.layout.spans:
        for key, _, rank in site.values():
            columns += [keys.get(key, -1)] * rank
    return by_key[:, columns], by_key[by_key != 0].unique().tolist()


class Gathered(SharedShrink):
    """The share of a site is the shrink's values for each token's own adapters."""

    __slots__ = ("_alpha", "_bags", "_num_columns", "_own", "_parts", "_signs")

    def __init__(self, stats: BatchStats) -> None:
        super().__init__(stats)
        layout = stats.layout
        # The shrink is computed as `a x^T` with at least two columns, because oneDNN reads both faster.
        self._num_columns = columns = max(2, stats.num_tokens)
        own: list[Tensor] = []  # indices into the shrink [rows of the group, columns], by site, token, lane, rank
        signs: list[Tensor] = []
        self._parts = []
        # By site: rows of its Bt, and the offset of each token's first row.
        self._bags: dict[int, tuple[Tensor, Tensor]] = {}
        first = 0
        for index in stats.live:
            tokens, rows, site_signs, offsets = _weighed_rows(stats, index)
            own.append((rows + layout.first_rows[index]) * columns + tokens)
            signs.append(site_signs)
            self._parts.append((index, slice(first, first + len(rows))))
            first += len(rows)
            self._bags[index] = rows.to(layout.device), offsets.to(layout.device)
        self._own = torch.cat(own).to(layout.device)
        all_signs = torch.cat(signs)
        distinct = all_signs.unique().tolist()
        self._alpha = distinct[0] if len(distinct) == 1 else 1.0
        self._signs = all_signs.to(layout.device, layout.dtype) if len(distinct) > 1 else None

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        assert packed is not None
        index = site.index
        share = self._share(x, index, packed)
        if share is not None:
            rows, offsets = self._bags[index]
            deltas = torch.embedding_bag(packed.bts[index], rows, offsets, False, _SUM, False, share, False)[0]
            if self._part is not None:
                y = y[self._part]
            y.add_(deltas, alpha=self._alpha)

    def _compute(self, x: Tensor, packed: Packed) -> dict[int, Tensor]:
        if self._part is not None:
            x = x[self._part]
        own = torch.mm(packed.a, x.expand(self._num_columns, -1).t()).view(-1).index_select(0, self._own)
        if self._signs is not None:
            own.mul_(self._signs)
        if self._lone:
            return {0: own}
        return {index: own[part] for index, part in self._parts}


_SUM = 0  # mode of torch.embedding_bag


def _weighed_rows(stats: BatchStats, site: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows of a site's Bt that each token uses, ordered by token and lane: token, row and sign of each entry, and
    the offset of each token's first entry."""
    spans = stats.layout.spans[site]
    lanes = [
        (start - stats.start, stop - start, span.start, span.rank, int(sign))
        for key, start, stop, sign in stats.lanes
        if (span := spans.get(key)) is not None
    ]
    starts, lengths, first_rows, ranks, signs = torch.tensor(lanes, dtype=torch.int64).reshape(len(lanes), 5).unbind(1)
    lane, token = _counted(lengths)
    token += starts[lane]
    in_order = token.argsort(stable=True)  # lanes may overlap
    lane, token = lane[in_order], token[in_order]
    place, row = _counted(ranks[lane])
    lane, own = lane[place], token[place]
    offsets = torch.bincount(own, minlength=stats.num_tokens).cumsum(0)
    return own, row + first_rows[lane], signs[lane], torch.cat([offsets.new_zeros(1), offsets[:-1]])


def _counted(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges 0 to counts[0], 0 to counts[1], ..., concatenated: the index of each entry's range, and its value."""
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]


def _compiled(plan: SegmentPlan, stats: BatchStats) -> Strategy:
    """The compiled kernels, or the torch fallback without them, so that a table with this name works everywhere."""
    return Compiled(stats) if serves(stats.layout.device, stats.layout.dtype) else Gathered(stats)


def _divided(plan: SegmentPlan, stats: BatchStats) -> Strategy:
    """As `_compiled`: without the kernels, every lane is computed as a long lane."""
    serving = serves(stats.layout.device, stats.layout.dtype)
    return divided(stats.lanes, stats.layout.dtype) if serving else Loop(stats.lanes)


_packed_places: weakref.WeakKeyDictionary[Layout, PackedPlaces] = weakref.WeakKeyDictionary()


def _tiled(plan: SegmentPlan, stats: BatchStats, name: str = "tiled") -> Strategy:
    """The Triton kernels on packed copies, or the most similar strategy where Triton cannot run."""
    if not reads_in_place(stats.layout.device, stats.layout.dtype):
        return Batched(stats)
    places = _packed_places.get(stats.layout)
    if places is None:
        places = _packed_places[stats.layout] = PackedPlaces(stats.layout)
    return prepare_tiled(plan, stats, places, name)


def prepare_tiled(plan: SegmentPlan, stats: BatchStats, source: PlaceSource, name: str) -> Strategy:
    """The Triton kernels with the tiling of this name, which read factors at the places of a source."""
    from atmm.triton import lanes  # importing Triton is slow
    from atmm.triton.tiling import Tiling

    return lanes.prepare(plan, stats, source, None if name == "tiled" else Tiling.named(name))


def reads_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels exist for this device and type that read factors through a `FactorTable`."""
    return dtype is not torch.float64 and (device.type == "cuda" or triton_interprets())


@functools.cache
def triton_interprets() -> bool:
    """Whether the Triton kernels run in Triton's interpreter, on CPU tensors. Triton reads the variable once, too."""
    return os.environ.get("TRITON_INTERPRET") == "1"


STRATEGIES: dict[str, Callable[[SegmentPlan, BatchStats], Strategy]] = {
    "loop": lambda plan, stats: Loop(stats.lanes),
    "batched": lambda plan, stats: Batched(stats),
    "stacked": lambda plan, stats: Stacked(stats),
    "gathered": lambda plan, stats: Gathered(stats),
    "compiled": _compiled,
    "divided": _divided,
    "tiled": _tiled,
}


NEED_NO_COPY = frozenset({"loop", "divided"})
"""Strategies that read the sites' own factors, packed or not."""


def known(name: str) -> bool:
    """Whether a strategy has this name: one of `STRATEGIES`, or "tiled" with the sizes of its tiles."""
    return name in STRATEGIES or name.startswith("tiled ")


def served(name: str, device_type: str) -> bool:
    """Whether requests can be served with a known strategy: those of a GPU read factors in place."""
    return name.startswith("tiled") if device_type == "cuda" else known(name)


def prepare(name: str, plan: SegmentPlan, stats: BatchStats) -> Strategy:
    return _tiled(plan, stats, name) if name.startswith("tiled ") else STRATEGIES[name](plan, stats)
