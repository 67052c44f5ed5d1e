"""Ways to add the deltas with plain torch operators, all the same in effect; `atmm.selection` says which is fast where.

A strategy is prepared once per plan and class of sites, then called at every site of the class: `strategy(y, x, site,
packed)` adds to y [T, d_out] in place; x is [T, d_in], `packed` the packed copy of the site's group.

loop      per lane, two products. Needs no packed copy. For few, long or uneven segments of high rank.
batched   per run of equal lanes, two batched products on views of the packed copy: no rank and no token is padded, nothing
          is gathered. For many equal segments of high rank.
stacked   one shrink of all tokens with all packed adapters of all sites of the group, cleared where a token meets another's
          adapter; one expand per site. Wasted arithmetic, few calls: for a small sum of ranks.
gathered  the same shrink; each token's own columns of it are gathered, and weigh its own rows of Bt in an embedding bag, once
          for all sites of one d_out. No wasted arithmetic in the expand, and rows are read as they lie: for decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from atmm.segments import Lane
from atmm.sites import Packed, Site
from atmm.survey import Survey


class Strategy(Protocol):
    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None: ...


class Loop:
    """Segment loop of `addmm_`, from the site's own factors."""

    def __init__(self, lanes: tuple[Lane, ...]) -> None:
        self._lanes = lanes

    @classmethod
    def prepare(cls, survey: Survey) -> Loop:
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
        self._first_rows = survey.layout.first_rows
        self._runs = survey.runs

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


class _Grouped:
    """What the two strategies with a group-wide shrink have in common: the first site called computes every site's share.

    The shares answer for exactly one packed copy and one input, each once. The input is held meanwhile, so that its memory
    cannot become another tensor's; callers hand over a new view of it at every site, which is recognised by memory, shape
    and strides and, where torch counts writes, by version.
    """

    def __init__(self, survey: Survey) -> None:
        self._start, self._stop = survey.start, survey.stop
        self._widths = survey.layout.widths
        self._lone = len(survey.layout.widths) == 1
        self._shares: dict[int, Tensor] = {}  # by site, of those that have not called yet
        self._packed: Packed | None = None
        self._x: Tensor | None = None
        self._version: int | None = None

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        assert packed is not None
        index = site.index
        if not self._widths[index]:
            return
        if self._lone:
            share = self._shares_of(x, packed)[0]
        else:
            known = self._shares.pop(index, None)
            if known is None or packed is not self._packed or not self._is_held(x):
                self._shares = shares = self._shares_of(x, packed)
                self._packed, self._x = packed, x
                self._version = None if x.is_inference() else x._version
                known = shares.pop(index)
            if not self._shares:
                self._packed = self._x = None
            share = known
        if y.size(0) != self._stop - self._start:
            y = y[self._start : self._stop]
        self._add(y, share, packed, index)

    def _is_held(self, x: Tensor) -> bool:
        return x.is_set_to(self._x) and (self._version is None or self._version == x._version)

    def _shrink(self, x: Tensor, packed: Packed) -> Tensor:
        if x.size(0) != self._stop - self._start:
            x = x[self._start : self._stop]
        return F.linear(x, packed.a)

    def _shares_of(self, x: Tensor, packed: Packed) -> dict[int, Tensor]:
        """By site that has rows, what `_add` needs."""
        raise NotImplementedError

    def _add(self, y: Tensor, share: Tensor, packed: Packed, index: int) -> None:
        raise NotImplementedError


class Stacked(_Grouped):
    """Share of a site: its columns of the masked shrink."""

    def __init__(self, survey: Survey) -> None:
        super().__init__(survey)
        layout = survey.layout
        columns = zip(range(len(layout.widths)), layout.first_rows, layout.widths, strict=True)
        self._columns = [(index, first, width) for index, first, width in columns if width]
        signs = _signs(survey)
        kept = signs != 0
        distinct = signs[kept].unique().tolist()
        self._alpha = distinct[0] if len(distinct) == 1 else 1.0
        self._bits = _BITS[layout.dtype.itemsize]
        self._keep = None if kept.all() else kept.to(self._bits).neg_().to(layout.device)
        self._signs = signs.to(layout.device, layout.dtype) if len(distinct) > 1 else None

    def _shares_of(self, x: Tensor, packed: Packed) -> dict[int, Tensor]:
        hidden = self._shrink(x, packed)
        if self._keep is not None:
            # Bits are cleared, not multiplied by zero: where another's adapter overflows, no NaN may come of it here.
            hidden.view(self._bits).bitwise_and_(self._keep)
        if self._signs is not None:
            hidden.mul_(self._signs)
        if self._lone:
            return {0: hidden}
        return {index: hidden[:, first : first + width] for index, first, width in self._columns}

    def _add(self, y: Tensor, share: Tensor, packed: Packed, index: int) -> None:
        y.addmm_(share, packed.bts[index], alpha=self._alpha)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signs(survey: Survey) -> Tensor:
    """[tokens of the survey, rows of the layout]: the sum of the signs with which a token meets an adapter; 0 is not at all."""
    keys = {key: place for place, key in enumerate(survey.keys)}
    by_key = torch.zeros(survey.num_tokens, len(keys) + 1)  # the last column: packed, but without a lane
    for key, start, stop, sign in survey.lanes:
        by_key[start - survey.start : stop - survey.start, keys[key]] += sign
    columns = [place for site in survey.layout.spans for key, _, rank in site.values() for place in [keys.get(key, -1)] * rank]
    return by_key[:, columns]


class Gathered(_Grouped):
    """Share of a site: its tokens' deltas."""

    def __init__(self, survey: Survey) -> None:
        super().__init__(survey)
        layout = survey.layout
        tensor = functools.partial(torch.tensor, dtype=torch.int64, device=layout.device)
        own: list[int] = []  # places in the shrink [tokens, rows of the group], by block, site, token, lane, rank
        signs: list[float] = []
        self._bags = []  # per block: rows of the block, first of them by site and token, range in `own`
        for block in layout.blocks:
            rows: list[int] = []
            offsets: list[int] = []
            first, block_row = len(own), 0
            for index in block.sites:
                for token, lanes in enumerate(_lanes_by_token(survey)):
                    offsets.append(len(rows))
                    for key, sign in lanes:
                        span = layout.spans[index].get(key)
                        if span is None:
                            continue
                        place = token * layout.num_rows + layout.first_rows[index] + span.start
                        own.extend(range(place, place + span.rank))
                        rows.extend(range(block_row + span.start, block_row + span.start + span.rank))
                        signs.extend([sign] * span.rank)
                block_row += layout.widths[index]
            self._bags.append((tensor(rows), tensor(offsets), first, len(rows)))
        self._own = tensor(own)
        self._alpha = -1.0 if set(signs) == {-1} else 1.0
        self._signs = torch.tensor(signs, dtype=layout.dtype, device=layout.device) if len(set(signs)) > 1 else None
        self._blocks = layout.blocks

    def _shares_of(self, x: Tensor, packed: Packed) -> dict[int, Tensor]:
        weights = self._shrink(x, packed).view(-1).index_select(0, self._own)
        if self._signs is not None:
            weights.mul_(self._signs)
        shares: dict[int, Tensor] = {}
        for block, rows, (indices, offsets, first, count) in zip(self._blocks, packed.blocks, self._bags, strict=True):
            if count == len(self._own):
                own = weights
            elif count:
                own = weights[first : first + count]
            else:
                continue
            deltas = torch.embedding_bag(rows, indices, offsets, False, _SUM, False, own, False)[0]
            if len(block.sites) == 1:
                shares[block.sites[0]] = deltas
            else:
                shares.update(zip(block.sites, deltas.chunk(len(block.sites)), strict=True))
        return shares

    def _add(self, y: Tensor, share: Tensor, packed: Packed, index: int) -> None:
        y.add_(share, alpha=self._alpha)


_SUM = 0  # mode of torch.embedding_bag


def _lanes_by_token(survey: Survey) -> list[list[tuple[str, float]]]:
    by_token: list[list[tuple[str, float]]] = [[] for _ in range(survey.num_tokens)]
    for key, start, stop, sign in survey.lanes:
        for token in range(start - survey.start, stop - survey.start):
            by_token[token].append((key, sign))
    return by_token


STRATEGIES: dict[str, Callable[[Survey], Strategy]] = {
    "loop": Loop.prepare,
    "batched": Batched,
    "stacked": Stacked,
    "gathered": Gathered,
}
