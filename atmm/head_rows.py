"""A task head as input of the operator: rows of a matrix, and the hidden states that they read."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class HeadRows:
    """weight: [c, hidden]. bias: [c] or None. index: int64 [rows], the rows of the hidden states this head reads."""

    weight: Tensor
    bias: Tensor | None
    index: Tensor
