"""Shrink and expand of a delta as separate calls, so that ranks can exchange hidden values between them (S-LoRA,
section 6).

Hidden values are stored in one flat tensor, lane after lane, each lane as row-major [tokens, rank]: in float32 between
two compiled kernels, else in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atmm.cpu import library
from atmm.cpu.table import Rows, hidden_places, lane_table
from atmm.dispatch import is_thin
from atmm.matmul import add_product, widened
from atmm.segments import Lane


class ShrinkPart(NamedTuple):
    """A lane and its `a` [r, d_in]."""

    lane: Lane
    a: Tensor


class ExpandPart(NamedTuple):
    """A lane, its `bt` [r, d_out], and the offsets of its hidden values in the flat tensor.

    With several offsets, each of them holds an equal share of the r columns, in order.
    """

    lane: Lane
    bt: Tensor
    places: Sequence[int]


class Shrink:
    """Hidden values `sign * x a^T` of lanes that read one input.

    May be called as long as the addresses of the factors do not change.

    size: number of values. places: offset of each part in the flat tensor.
    """

    def __init__(self, parts: Sequence[ShrinkPart], num_tokens: int) -> None:
        """num_tokens: tokens of the input. Raises ValueError for factors that differ in dtype or width."""
        self._parts = parts
        self._num_tokens = num_tokens
        self._kind = _kind([part.a for part in parts])
        self.places, self.size = hidden_places((lane, a.shape[0]) for lane, a in parts)
        self._tables: tuple[_Table, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The flat hidden values of x [num_tokens, d_in]. Raises ValueError if x does not fit."""
        _check(x, self._num_tokens, self._kind)
        if not is_thin(self._num_tokens, x.device, x.dtype):
            hidden = [F.linear(*widened(x[lane.start : lane.stop], a)) for lane, a in self._parts]
            signed = [part if lane.sign > 0 else -part for part, (lane, _) in zip(hidden, self._parts, strict=True)]
            return torch.cat([part.view(-1) for part in signed]).to(x.dtype)
        if self._tables is None:
            signs = torch.tensor([lane.sign for lane, _ in self._parts], dtype=torch.float32)
            self._tables = _Table((*part, place) for part, place in zip(self._parts, self.places, strict=True)), signs
        table, signs = self._tables
        kernels = library()
        assert kernels is not None, "the compiled kernels are not available"
        flat = torch.empty(self.size, dtype=torch.float32)
        kernels.shrink[x.dtype](
            flat.data_ptr(), x.data_ptr(), x.stride(0), x.stride(1), None, table.lanes.data_ptr(),
            signs.data_ptr(), len(table.lanes), self._num_tokens, x.shape[1],
        )  # fmt: skip
        return flat


class Expand:
    """Adds `hidden bt` of each lane to the outputs of one layer. The factors must not move, as for `Shrink`."""

    def __init__(self, parts: Sequence[ExpandPart], num_tokens: int) -> None:
        """num_tokens: tokens of the outputs. Raises ValueError for factors that differ in dtype or width."""
        self._parts = parts
        self._num_tokens = num_tokens
        self._kind = _kind([part.bt for part in parts])
        self._table: _Table | None = None

    def __call__(self, y: Tensor, hidden: Tensor) -> None:
        """Add to y [num_tokens, d_out], in place. hidden: those of a `Shrink`. Raises ValueError if y does not
        fit."""
        _check(y, self._num_tokens, self._kind)
        if not is_thin(self._num_tokens, y.device, y.dtype):
            for lane, bt, places in self._parts:
                shape = lane.stop - lane.start, bt.shape[0] // len(places)
                shares = [hidden[place : place + shape[0] * shape[1]].view(shape) for place in places]
                share = shares[0] if len(shares) == 1 else torch.cat(shares, 1)
                add_product(y[lane.start : lane.stop], *widened(share, bt))
            return
        if self._table is None:
            self._table = _Table(
                (part.lane, share, place)
                for part in self._parts
                for share, place in zip(part.bt.chunk(len(part.places)), part.places, strict=True)
            )
        lanes = self._table.lanes
        kernels = library()
        assert kernels is not None, "the compiled kernels are not available"
        kernels.expand[y.dtype](
            y.data_ptr(), y.stride(0), y.stride(1), hidden.data_ptr(), None, lanes.data_ptr(), len(lanes),
            self._num_tokens, y.shape[1],
        )  # fmt: skip


class _Table:
    """The lane table for the compiled kernels, and the tensors that it points to."""

    def __init__(self, parts: Iterable[tuple[Lane, Tensor, int]]) -> None:
        in_rows = [(lane, rows if rows.stride(1) == 1 else rows.contiguous(), place) for lane, rows, place in parts]
        self._kept = [rows for _, rows, _ in in_rows]
        self.lanes = lane_table([(lane, Rows.of(rows), place) for lane, rows, place in in_rows])


def _kind(factors: Sequence[Tensor]) -> tuple[torch.dtype, int] | None:
    """The common dtype and row length of the factors; None without factors."""
    kinds = {(factor.dtype, factor.shape[1]) for factor in factors}
    if len(kinds) > 1:
        found = " and ".join(sorted(f"{dtype} in rows of {width}" for dtype, width in kinds))
        raise ValueError(f"factors of {found}; load all in the model's dtype, for one layer")
    return next(iter(kinds), None)


def _check(tokens: Tensor, num_tokens: int, kind: tuple[torch.dtype, int] | None) -> None:
    if tokens.shape[0] != num_tokens or kind not in (None, (tokens.dtype, tokens.shape[1])):
        factors = "" if kind is None else f" and factors of {kind[0]} in rows of {kind[1]}"
        raise ValueError(
            f"{tuple(tokens.shape)} values of {tokens.dtype} do not fit {num_tokens} tokens{factors}; prepare shrink "
            "and expand for this batch, in the model's dtype"
        )
