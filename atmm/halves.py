"""A delta in two halves, for who has something to do between them: ranks that exchange hidden values (S-LoRA, section
6).

Hidden values lie in one flat tensor, lane after lane, each lane's [tokens, rank] row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atmm.compiled import library
from atmm.segments import Lane
from atmm.selection import reads_in_place


def hidden_dtype(num_tokens: int, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What hidden values are kept in: float32 between two compiled kernels, else the model's own dtype."""
    return torch.float32 if reads_in_place(num_tokens, device, dtype) else dtype


class Shrinking(NamedTuple):
    """A lane's `a` [r, d_in]."""

    lane: Lane
    a: Tensor


class Expanding(NamedTuple):
    """A lane's `bt` [r, d_out], and where its hidden values start in the flat tensor: in one place, or in several, each
    with an equal share of the r in their order."""

    lane: Lane
    bt: Tensor
    places: Sequence[int]


class Shrink:
    """Hidden values `sign * x a^T` of lanes that read one input. May be called for as long as the factors lie where
    they lay.

    size: number of values. places: where each part's begin in the flat tensor.
    """

    def __init__(self, parts: Sequence[Shrinking], num_tokens: int) -> None:
        """num_tokens: of the input. Raises ValueError for factors of several dtypes."""
        self._parts = parts
        self._num_tokens = num_tokens
        self._dtype = _one_dtype([part.a for part in parts])
        self.places: list[int] = []
        self.size = 0
        for lane, a in parts:
            self.places.append(self.size)
            self.size += (lane.stop - lane.start) * a.shape[0]
        self._tables: tuple[_Table, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, d_in]; flat, in `hidden_dtype`. Raises ValueError for an input of other tokens or dtype."""
        _check(x, self._num_tokens, self._dtype)
        if not reads_in_place(self._num_tokens, x.device, x.dtype):
            hidden = [F.linear(x[lane.start : lane.stop], a) for lane, a in self._parts]
            signed = [part if lane.sign > 0 else -part for part, (lane, _) in zip(hidden, self._parts, strict=True)]
            return torch.cat([part.view(-1) for part in signed])
        if self._tables is None:
            signs = torch.tensor([lane.sign for lane, _ in self._parts], dtype=torch.float32)
            self._tables = _Table((*part, place) for part, place in zip(self._parts, self.places, strict=True)), signs
        table, signs = self._tables
        kernels = library()
        assert kernels is not None, "asked for compiled kernels where there are none"
        flat = torch.empty(self.size, dtype=torch.float32)
        kernels.shrink[x.dtype](
            flat.data_ptr(), x.data_ptr(), x.stride(0), x.stride(1), None, table.lanes.data_ptr(),
            signs.data_ptr(), len(table.lanes), self._num_tokens, x.shape[1],
        )  # fmt: skip
        return flat


class Expand:
    """What hidden values add to one layer's outputs, `hidden bt` for each lane. May be called as `Shrink` may."""

    def __init__(self, parts: Sequence[Expanding], num_tokens: int) -> None:
        """num_tokens: of the outputs. Raises ValueError for factors of several dtypes."""
        self._parts = parts
        self._num_tokens = num_tokens
        self._dtype = _one_dtype([part.bt for part in parts])
        self._table: _Table | None = None

    def __call__(self, y: Tensor, hidden: Tensor) -> None:
        """Add to y [num_tokens, d_out], in place. hidden: flat, in `hidden_dtype`. Raises ValueError for outputs of
        other tokens or dtype."""
        _check(y, self._num_tokens, self._dtype)
        if not reads_in_place(self._num_tokens, y.device, y.dtype):
            for lane, bt, places in self._parts:
                shape = lane.stop - lane.start, bt.shape[0] // len(places)
                shares = [hidden[place : place + shape[0] * shape[1]].view(shape) for place in places]
                y[lane.start : lane.stop].addmm_(shares[0] if len(shares) == 1 else torch.cat(shares, 1), bt)
            return
        if self._table is None:
            self._table = _Table(
                (part.lane, share, place)
                for part in self._parts
                for share, place in zip(part.bt.chunk(len(part.places)), part.places, strict=True)
            )
        lanes = self._table.lanes
        kernels = library()
        assert kernels is not None, "asked for compiled kernels where there are none"
        kernels.expand[y.dtype](
            y.data_ptr(), y.stride(0), y.stride(1), hidden.data_ptr(), None, lanes.data_ptr(), len(lanes),
            self._num_tokens, y.shape[1],
        )  # fmt: skip


class _Table:
    """Lanes as the compiled kernels read them: first token, tokens, address in elements, row stride, rank, place of the
    hidden values. Keeps what it points to."""

    def __init__(self, parts: Iterable[tuple[Lane, Tensor, int]]) -> None:
        in_rows = [(lane, rows if rows.stride(1) == 1 else rows.contiguous(), place) for lane, rows, place in parts]
        self._kept = [rows for _, rows, _ in in_rows]
        self.lanes = torch.tensor(
            [
                (lane.start, lane.stop - lane.start, a.data_ptr() // a.element_size(), a.stride(0), len(a), place)
                for lane, a, place in in_rows
            ],
            dtype=torch.int64,
        )


def _one_dtype(factors: Sequence[Tensor]) -> torch.dtype | None:
    dtypes = {factor.dtype for factor in factors}
    if len(dtypes) > 1:
        raise ValueError(f"factors of {' and '.join(sorted(map(str, dtypes)))}; load all in the model's dtype")
    return next(iter(dtypes), None)


def _check(tokens: Tensor, num_tokens: int, dtype: torch.dtype | None) -> None:
    if tokens.shape[0] != num_tokens or dtype not in (None, tokens.dtype):
        raise ValueError(
            f"{tuple(tokens.shape)} values of {tokens.dtype} do not fit {num_tokens} tokens and factors of {dtype}; "
            "prepare both halves for this batch, in the model's dtype"
        )
