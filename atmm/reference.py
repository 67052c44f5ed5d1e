"""What the operator means, in plain torch and the precision of its inputs: the specification every fast path is tested by."""

from __future__ import annotations

import torch

from atmm.segments import SegmentPlan
from atmm.sites import Site


def add_delta(y: torch.Tensor, x: torch.Tensor, site: Site, plan: SegmentPlan) -> None:
    """y [T, d_out] += sum over lanes of sign * (x a^T) bt, in place."""
    for lane in plan.lanes:
        factors = site.factors.get(lane.key)
        if factors is not None:
            rows = slice(lane.start, lane.stop)
            y[rows] += lane.sign * ((x[rows] @ factors.a.t()) @ factors.bt)


def merge(out: torch.Tensor, base: torch.Tensor, a: torch.Tensor, bt: torch.Tensor, scale: float = 1.0) -> None:
    """out[n] = base[n] + scale * bt[n]^T a[n] for every layer n."""
    out.copy_(base + scale * (bt.transpose(1, 2) @ a))
