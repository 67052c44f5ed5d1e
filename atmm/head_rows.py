"""A task head as the operator sees it: rows of a matrix, and which hidden states they read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class HeadRows(NamedTuple):
    """weight: [c, hidden]. bias: [c] or None. index: int64 [rows], the rows of the hidden states that this head reads."""

    weight: Tensor
    bias: Tensor | None
    index: Tensor
