"""ATMM, the adaptive-tiling matmul (V-LoRA section 4.3): heterogeneous adapters in one batch, and one-shot merging.

CPU form: the "tiling" is a choice among ways to arrange matrix products. GPU kernels come in behind the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from atmm.segments import SegmentPlan
from atmm.selection import choose
from atmm.sites import Site


def add_delta(y: torch.Tensor, x: torch.Tensor, site: Site, plan: SegmentPlan) -> None:
    """y [T, d_out] += the deltas of the plan's lanes at this site for x [T, d_in], in place.

    A token may be in no lane, one, or several; adapters of any rank side by side; adapters that miss the site add nothing.
    """
    if site.factors:
        choose(site, plan)(y, x, site, plan)


def merge(out: torch.Tensor, base: torch.Tensor, a: torch.Tensor, bt: torch.Tensor, scale: float = 1.0) -> None:
    """out = base + scale * bt^T a for n layers at once: one shot for all layers of a shape.

    out, base [n, d_out, d_in]; a [n, r, d_in] and bt [n, r, d_out] may be strided views. out may be base itself.
    """
    torch.baddbmm(base, bt.transpose(1, 2), a, alpha=scale, out=out)


class HeadRows(NamedTuple):
    """One task head and the rows it reads: weight [c, hidden], bias [c] or None, index int64 [n] into the hidden states."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    index: torch.Tensor


def head_logits(hidden: torch.Tensor, heads: Sequence[HeadRows]) -> list[torch.Tensor]:
    """Logits [n, c] per head, from hidden [T, hidden]."""
    return [torch.nn.functional.linear(hidden.index_select(0, index), weight, bias) for weight, bias, index in heads]
