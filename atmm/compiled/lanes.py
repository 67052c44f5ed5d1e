"""The strategy that decodes with the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from atmm.compiled import library
from atmm.shares import GroupShares
from atmm.sites import Packed, Site
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
        self._lanes: dict[int, Tensor] = {}  # by site: first token, tokens, first row of Bt, rank, place in hidden
        size = 0
        for index in survey.live:
            expanded: list[tuple[int, ...]] = []
            for key, start, stop, sign in survey.lanes:
                span = layout.spans[index].get(key)
                if span is None or not span.rank:
                    continue
                lane = start - survey.start, stop - start
                shrunk.append((*lane, layout.first_rows[index] + span.start, span.rank, size))
                expanded.append((*lane, span.start, span.rank, size))
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
            y.data_ptr(), y.stride(0), y.stride(1), hidden.data_ptr(), bt.data_ptr(), bt.stride(0), lanes.data_ptr(),
            lanes.shape[0], self._num_tokens, y.shape[1],
        )  # fmt: skip

    def _compute(self, x: Tensor, packed: Packed) -> dict[int, Tensor]:
        if self._part is not None:
            x = x[self._part]
        a, lanes, hidden = packed.a, self._shrink_lanes, self._hidden
        self._shrink(
            hidden.data_ptr(), x.data_ptr(), x.stride(0), x.stride(1), a.data_ptr(), a.stride(0), lanes.data_ptr(),
            self._signs.data_ptr(), lanes.shape[0], self._num_tokens, x.shape[1],
        )  # fmt: skip
        return dict.fromkeys(self._lanes, hidden)


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled kernels are there for this device and type."""
    kernels = library() if device.type == "cpu" else None
    return kernels is not None and dtype in kernels.shrink
