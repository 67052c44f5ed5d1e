"""A task head as the operator sees it: rows of a matrix, and which hidden states they read."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class HeadRows:
    """weight: [c, hidden]. bias: [c] or None. index: int64 [rows], which rows of the hidden states this head reads."""

    weight: Tensor
    bias: Tensor | None
    index: Tensor
