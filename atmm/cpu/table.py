"""What the compiled kernels read of lanes: a row for each, as `struct Lane` in `lanes.cpp` has it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atmm.segments import Lane


class Rows(NamedTuple):
    """Where a factor's rows lie. start: in bytes from a base that the kernel is given, or from address zero. stride: in
    elements."""

    start: int
    stride: int
    rank: int

    @classmethod
    def of(cls, factor: Tensor) -> Rows:
        """From address zero. factor: [rank, d], each row's values adjacent; it must be kept."""
        return cls(factor.data_ptr(), factor.stride(0), factor.shape[0])


def hidden_places(parts: Iterable[tuple[Lane, int]]) -> tuple[list[int], int]:
    """Where each part's hidden values begin, [tokens, rank] one part after the other, and how many they are together.

    parts: a lane with its rank.
    """
    sizes = ((lane.stop - lane.start) * rank for lane, rank in parts)
    *places, size = itertools.accumulate(sizes, initial=0)
    return places, size


def lane_table(parts: Sequence[tuple[Lane, Rows, int]], first_token: int = 0) -> Tensor:
    """int64 [parts, 6]: first token, tokens, where the rows start, how far they are apart, rank, place of the hidden
    values.

    parts: a lane, its rows, its place. first_token: the batch's token that is the kernel's first.
    """
    rows = [(lane.start - first_token, lane.stop - lane.start, *rows, place) for lane, rows, place in parts]
    return torch.tensor(rows, dtype=torch.int64)
