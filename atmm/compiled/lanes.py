"""The strategies that decode with the compiled kernels: from a packed copy, and from adapters where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atmm.compiled import library
from atmm.segments import Lane
from atmm.shares import GroupShares
from atmm.sites import Factors, Packed, Site, row_strides
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
        self._lanes = lanes
        self._tables: dict[Site, _Tables] = {}

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        tables = self._tables.get(site)
        if tables is None or any(site.factors.get(key) is not factors for key, factors in tables.read):
            tables = self._tables_of(site, x)
        if not tables.num_lanes:
            return
        kernels = library()
        assert kernels is not None, "asked for compiled kernels where there are none"
        num_tokens = self._stop - self._start
        x, y, hidden = x[self._start : self._stop], y[self._start : self._stop], tables.hidden.data_ptr()
        kernels.shrink[x.dtype](
            hidden, x.data_ptr(), x.stride(0), x.stride(1), None, tables.shrink.data_ptr(), tables.signs.data_ptr(),
            tables.num_lanes, num_tokens, x.shape[1],
        )  # fmt: skip
        kernels.expand[x.dtype](
            y.data_ptr(), y.stride(0), y.stride(1), hidden, None, tables.expand.data_ptr(), tables.num_lanes,
            num_tokens, y.shape[1],
        )  # fmt: skip

    def _tables_of(self, site: Site, x: Tensor) -> _Tables:
        shrink: list[tuple[int, ...]] = []
        expand: list[tuple[int, ...]] = []
        signs: list[float] = []
        copies: list[Tensor] = []
        size = 0
        for key, start, stop, sign in self._lanes:
            factors = site.factors.get(key)
            if factors is None or not factors.a.shape[0]:
                continue
            a, bt = factors
            if (a.dtype, a.device) != (x.dtype, x.device):
                raise ValueError(
                    f"{site.name}: x is {x.dtype} on {x.device}, adapter {key!r} {a.dtype} on {a.device}; load "
                    "adapters in the model's dtype, on its device"
                )
            if a.stride(1) != 1 or bt.stride(1) != 1:
                a, bt = a.contiguous(), bt.contiguous()
                copies += a, bt
            lane, rank = (start - self._start, stop - start), a.shape[0]
            shrink.append((*lane, a.data_ptr() // a.element_size(), a.stride(0), rank, size))
            expand.append((*lane, bt.data_ptr() // bt.element_size(), bt.stride(0), rank, size))
            signs.append(sign)
            size += (stop - start) * rank
        made = _Tables(
            tuple({lane.key: site.factors.get(lane.key) for lane in self._lanes}.items()),
            torch.tensor(shrink, dtype=torch.int64),
            torch.tensor(expand, dtype=torch.int64),
            torch.tensor(signs, dtype=torch.float32),
            torch.empty(size, dtype=torch.float32),
            len(signs),
            copies,
        )
        if not copies:  # which would not see what is written into the factors later
            self._tables[site] = made
        return made


class _Tables(NamedTuple):
    """What the kernels read for one site. read: the factors it was made from, None where there were none. shrink,
    expand: lanes, as in `lanes.cpp`, with addresses. copies: factors that lie in no rows."""

    read: tuple[tuple[str, Factors | None], ...]
    shrink: Tensor
    expand: Tensor
    signs: Tensor
    hidden: Tensor
    num_lanes: int
    copies: list[Tensor]


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled kernels are there for this device and type."""
    kernels = library() if device.type == "cpu" else None
    return kernels is not None and dtype in kernels.shrink
