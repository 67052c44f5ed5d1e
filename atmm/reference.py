"""The specification: the same three operations in a few lines of plain torch, in float64 by default.

Every strategy and kernel is tested against these functions. They are slow, allocate memory and never read a packed
copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atmm.layers import HeadRows, Site
from atmm.segments import SegmentPlan


def add_delta(y: Tensor, x: Tensor, site: Site, plan: SegmentPlan, dtype: torch.dtype = torch.float64) -> Tensor:
    """A new tensor [T, d_out]: `y` plus every lane's `sign * (x a^T) bt`; x [T, d_in]. The inputs are not modified."""
    out = y.to(dtype, copy=True)
    for lane in plan.lanes:
        factors = site.factors.get(lane.key)
        if factors is not None:
            hidden = x[lane.start : lane.stop].to(dtype) @ factors.a.to(dtype).T
            out[lane.start : lane.stop] += lane.sign * (hidden @ factors.bt.to(dtype))
    return out


def merge(base: Tensor, a: Tensor, bt: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A new tensor [n, o, i]: `base + scale * bt^T a`; a [n, r, i], bt [n, r, o]."""
    return base.to(dtype) + scale * torch.einsum("nro,nri->noi", bt.to(dtype), a.to(dtype))


def head_logits(h: Tensor, rows: Sequence[HeadRows], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Per head, [rows, c]: `h[index] weight^T + bias`; h [T, hidden]."""
    logits = []
    for head in rows:
        product = h[head.index].to(dtype) @ head.weight.to(dtype).T
        logits.append(product if head.bias is None else product + head.bias.to(dtype))
    return logits
