"""The strategies that decode with the compiled kernels: from a packed copy, and from adapters where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atmm.compiled import library
from atmm.segments import Lane
from atmm.shares import GroupShares
from atmm.sites import Packed, Site, row_strides
from atmm.survey import Survey


class Compiled(GroupShares):
    """Share of a site: its lanes' hidden values, in a buffer common to the group. Only where `serves` holds."""

    adds_transposed = True

    __slots__ = ("_expand", "_hidden", "_lanes", "_num_tokens", "_shrink", "_shrink_lanes", "_signs")

    def __init__(self, survey: Survey) -> None:
        super().__init__(survey)
        layout = survey.layout
        kernels = library()
        assert kernels is not None, "asked for compiled kernels where there are none"
        self._shrink, self._expand = kernels.shrink[layout.dtype], kernels.expand[layout.dtype]
        self._num_tokens = survey.num_tokens
        shrunk: list[tuple[int, ...]] = []
        signs: list[float] = []
        # By site: first token, tokens, where the rows of Bt start and how far they are apart, rank, place in hidden.
        self._lanes: dict[int, Tensor] = {}
        a_stride, bt_strides = row_strides(layout)
        size = 0
        for index in survey.live:
            expanded: list[tuple[int, ...]] = []
            for key, start, stop, sign in survey.lanes:
                span = layout.spans[index].get(key)
                if span is None or not span.rank:
                    continue
                lane = start - survey.start, stop - start
                row = layout.first_rows[index] + span.start
                shrunk.append((*lane, row * a_stride, a_stride, span.rank, size))
                expanded.append((*lane, span.start * bt_strides[index], bt_strides[index], span.rank, size))
                signs.append(sign)
                size += (stop - start) * span.rank
            self._lanes[index] = torch.tensor(expanded, dtype=torch.int64)
        self._shrink_lanes = torch.tensor(shrunk, dtype=torch.int64)
        self._signs = torch.tensor(signs, dtype=torch.float32)
        self._hidden = torch.empty(size, dtype=torch.float32)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        assert packed is not None
        hidden = self._share(x, site.index, packed)
        if hidden is None:
            return
        if self._part is not None:
            y = y[self._part]
        bt, lanes = packed.bts[site.index], self._lanes[site.index]
        self._expand(
            y.data_ptr(), y.stride(0), y.stride(1), hidden.data_ptr(), bt.data_ptr(), lanes.data_ptr(), lanes.shape[0],
            self._num_tokens, y.shape[1],
        )  # fmt: skip

    def _compute(self, x: Tensor, packed: Packed) -> dict[int, Tensor]:
        if self._part is not None:
            x = x[self._part]
        a, lanes, hidden = packed.a, self._shrink_lanes, self._hidden
        self._shrink(
            hidden.data_ptr(), x.data_ptr(), x.stride(0), x.stride(1), a.data_ptr(), lanes.data_ptr(),
            self._signs.data_ptr(), lanes.shape[0], self._num_tokens, x.shape[1],
        )  # fmt: skip
        return dict.fromkeys(self._lanes, hidden)


class Scattered:
    """The same from the sites' own factors: an adapter decodes from the moment it is loaded, and needs no second copy.

    Only where `serves` holds. One object serves every site of a plan.
    """

    adds_transposed = True

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._start = min((lane.start for lane in lanes), default=0)
        self._stop = max((lane.stop for lane in lanes), default=0)
        self._lanes = [(lane.key, lane.start - self._start, lane.stop - lane.start, lane.sign) for lane in lanes]

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        shrunk: list[int] = []
        expanded: list[int] = []
        signs: list[float] = []
        kept: list[Tensor] = []
        size = 0
        for key, first, num_tokens, sign in self._lanes:
            where = _address(site, key, x, kept)
            if where is None:
                continue
            a, a_stride, bt, bt_stride, rank = where
            shrunk += first, num_tokens, a, a_stride, rank, size
            expanded += first, num_tokens, bt, bt_stride, rank, size
            signs.append(sign)
            size += num_tokens * rank
        if not size:
            return
        kernels = library()
        assert kernels is not None, "asked for compiled kernels where there are none"
        tables = torch.tensor((shrunk, expanded), dtype=torch.int64)
        weights, hidden = torch.tensor(signs, dtype=torch.float32), torch.empty(size, dtype=torch.float32)
        count, num_tokens = len(signs), self._stop - self._start
        x, y = x[self._start : self._stop], y[self._start : self._stop]
        kernels.shrink[x.dtype](
            hidden.data_ptr(), x.data_ptr(), x.stride(0), x.stride(1), None, tables.data_ptr(), weights.data_ptr(),
            count, num_tokens, x.shape[1],
        )  # fmt: skip
        kernels.expand[x.dtype](
            y.data_ptr(), y.stride(0), y.stride(1), hidden.data_ptr(), None, tables[1].data_ptr(), count, num_tokens,
            y.shape[1],
        )  # fmt: skip


def _address(site: Site, key: str, x: Tensor, kept: list[Tensor]) -> tuple[int, int, int, int, int] | None:
    """Where an adapter's factors lie: A and its stride, Bt and its stride, in elements; rank. None for an adapter that
    does not target the site. kept: takes what must live until the kernels have run.

    Raises ValueError for factors of another dtype or device than x.
    """
    factors = site.factors.get(key)
    if factors is None or not factors.a.shape[0]:
        return None
    known = site.addresses.get(key)
    if known is not None and known[0] is factors:
        return known[1]
    a, bt = (factor if factor.stride(1) == 1 else factor.contiguous() for factor in factors)
    if (a.dtype, a.device) != (x.dtype, x.device):
        raise ValueError(
            f"{site.name}: x is {x.dtype} on {x.device}, adapter {key!r} {a.dtype} on {a.device}; load adapters in the "
            "model's dtype, on its device"
        )
    size = a.element_size()
    where = a.data_ptr() // size, a.stride(0), bt.data_ptr() // size, bt.stride(0), a.shape[0]
    if a is factors.a and bt is factors.bt:
        for gone in site.addresses.keys() - site.factors.keys():
            del site.addresses[gone]
        site.addresses[key] = factors, where
    else:
        kept += a, bt
    return where


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled kernels are there for this device and type."""
    kernels = library() if device.type == "cpu" else None
    return kernels is not None and dtype in kernels.shrink
