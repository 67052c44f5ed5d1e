"""Ways to add the deltas with plain torch operators, all the same in effect; `atmm.selection` says which one is fast where.

A strategy is prepared once per plan and class of sites, then called at every site: `strategy(y, x, site, packed)` adds to
y [T, d_out] in place; x [T, d_in]; `packed` is the site's group's packed copy.

`loop`     per lane, two products. Needs no packed copy. Best for few, long or uneven segments of high rank.
`batched`  per run of equal lanes, two batched products on views of the packed copy: no padding of ranks or of tokens, no gather.
           Best for many equal segments of high rank.
`stacked`  one shrink of all tokens with all packed adapters of all sites of the group, everything that belongs to another adapter
           cleared, one expand per site. Wasted arithmetic, few calls: best while the sum of ranks is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from atmm.segments import Lane
from atmm.sites import Layout, Packed, Site
from atmm.survey import Survey


class Strategy(Protocol):
    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None: ...


class Loop:
    """Segment loop of `addmm_`, from the site's own factors."""

    def __init__(self, lanes: tuple[Lane, ...]) -> None:
        self._lanes = lanes

    @classmethod
    def prepare(cls, survey: Survey) -> Strategy:
        return cls(survey.lanes)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        factors_of = site.factors
        for key, start, stop, sign in self._lanes:
            factors = factors_of.get(key)
            if factors is not None:
                y[start:stop].addmm_(F.linear(x[start:stop], factors.a), factors.bt, alpha=sign)


class Batched:
    """One `bmm` and one `baddbmm_` per run of equal lanes."""

    def __init__(self, survey: Survey) -> None:
        widths = survey.layout.widths
        self._first_rows = tuple(sum(widths[:index]) for index in range(len(widths)))
        self._runs = survey.runs

    @classmethod
    def prepare(cls, survey: Survey) -> Strategy:
        return cls(survey)

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


class Stacked:
    """One masked shrink per group, one expand per site."""

    def __init__(self, survey: Survey) -> None:
        layout = survey.layout
        self._start, self._stop = survey.start, survey.stop
        self._widths = layout.widths
        self._live = sum(1 << index for index, width in enumerate(layout.widths) if width)
        self._keep, self._weights, self._alpha = _mask(survey)
        self._bits = _INT_OF_SIZE[layout.dtype.itemsize]
        self._shared: _SharedShrink | None = None

    @classmethod
    def prepare(cls, survey: Survey) -> Strategy:
        return cls(survey)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        assert packed is not None
        index = site.index
        if not self._widths[index]:
            return
        if len(self._widths) == 1:
            hidden = self._shrink(x, packed)
        else:
            shared = self._shared
            if shared is None or not shared.serves(x, packed, index):
                columns = self._shrink(x, packed).split_with_sizes(self._widths, 1)
                shared = self._shared = _SharedShrink(x, packed, columns, self._live)
            hidden = shared.take(index)
            if not shared.waiting:
                self._shared = None
        if y.shape[0] != hidden.shape[0]:
            y = y[self._start : self._stop]
        y.addmm_(hidden, packed.bts[index], alpha=self._alpha)

    def _shrink(self, x: Tensor, packed: Packed) -> Tensor:
        if x.shape[0] != self._stop - self._start:
            x = x[self._start : self._stop]
        hidden = F.linear(x, packed.a)
        if self._keep is not None:
            # Clearing bits, not multiplying by zero: an infinity from another adapter's factors must not become a NaN here.
            hidden.view(self._bits).bitwise_and_(self._keep)
        if self._weights is not None:
            hidden.mul_(self._weights)
        return hidden


class _SharedShrink:
    """A group's shrink, waiting for the sites that have not taken their columns yet.

    It answers for exactly one packed copy and one input. The input is held, so its memory cannot become another tensor's, and is
    recognised by address, strides and, where torch counts writes, version: callers hand over a new view of it per site.
    """

    __slots__ = ("_columns", "_identity", "_packed", "_x", "waiting")

    def __init__(self, x: Tensor, packed: Packed, columns: tuple[Tensor, ...], live: int) -> None:
        self._x = x
        self._identity = _identity(x)
        self._packed = packed
        self._columns = columns
        self.waiting = live

    def serves(self, x: Tensor, packed: Packed, index: int) -> bool:
        return self._packed is packed and self.waiting >> index & 1 == 1 and _identity(x) == self._identity

    def take(self, index: int) -> Tensor:
        self.waiting &= ~(1 << index)
        return self._columns[index]


def _identity(x: Tensor) -> tuple[int, tuple[int, ...], int]:
    return x.data_ptr(), x.stride(), 0 if x.is_inference() else x._version


_INT_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _mask(survey: Survey) -> tuple[Tensor | None, Tensor | None, float]:
    """What becomes of the group's shrink [T, R]: (bits to keep, weights to multiply with, factor of the expand).

    Bits are None when every token has every column, weights when one factor serves all that is kept.
    """
    layout = survey.layout
    keys = tuple(dict.fromkeys(span.key for site in layout.spans for span in site))
    column = {key: index for index, key in enumerate(keys)}
    weights = torch.zeros(survey.num_tokens, len(keys))
    for key, start, stop, sign in survey.lanes:
        weights[start - survey.start : stop - survey.start, column[key]] += sign
    spans = [span for site in layout.spans for span in site]
    index = torch.tensor([column[span.key] for span in spans for _ in range(span.rank)])
    distinct = weights[weights != 0].unique().tolist()
    kept = weights != 0
    bits = None if kept.all() else -kept.index_select(1, index).to(_INT_OF_SIZE[layout.dtype.itemsize])
    if len(distinct) > 1:
        return _to(bits, layout), weights.index_select(1, index).to(layout.device, layout.dtype), 1.0
    return _to(bits, layout), None, distinct[0] if distinct else 0.0


def _to(bits: Tensor | None, layout: Layout) -> Tensor | None:
    return None if bits is None else bits.to(layout.device)


STRATEGIES: dict[str, Callable[[Survey], Strategy]] = {
    "loop": Loop.prepare,
    "batched": Batched.prepare,
    "stacked": Stacked.prepare,
}
