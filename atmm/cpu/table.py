"""The lane table of the compiled kernels: one row per lane, in the format of `struct Lane` in `lanes.cpp`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atmm.segments import Lane


class Rows(NamedTuple):
    """The location of a factor's rows.

    start: byte offset from the base address passed to the kernel, or from address zero. stride: in elements.
    """

    start: int
    stride: int
    rank: int

    @classmethod
    def of(cls, factor: Tensor) -> Rows:
        """Rows relative to address zero. factor: [rank, d] with contiguous rows; the caller must keep it alive."""
        return cls(factor.data_ptr(), factor.stride(0), factor.shape[0])


def hidden_places(parts: Iterable[tuple[Lane, int]]) -> tuple[list[int], int]:
    """The offset of each part's hidden values [tokens, rank], stored one part after the other, and their total number.

    parts: lanes with their rank.
    """
    sizes = ((lane.stop - lane.start) * rank for lane, rank in parts)
    *places, size = itertools.accumulate(sizes, initial=0)
    return places, size


def lane_table(parts: Sequence[tuple[Lane, Rows, int]], first_token: int = 0) -> Tensor:
    """int64 [parts, 6]: first token, tokens, start of the rows, row stride, rank, offset of the hidden values.

    parts: lanes with their rows and offsets. first_token: index in the batch of the kernel's first token.
    """
    rows = [(lane.start - first_token, lane.stop - lane.start, *rows, place) for lane, rows, place in parts]
    return torch.tensor(rows, dtype=torch.int64)
