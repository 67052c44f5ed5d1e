"""The specification: the operator's operations in a few lines of plain torch, in float64 by default.

Every strategy and kernel is tested against these functions. They are slow, allocate memory and never read a packed
copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atmm.layers import Factors, HeadRows, Site
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


def delta_gradients(
    g: Tensor, x: Tensor, site: Site, plan: SegmentPlan, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, dict[str, Factors]]:
    """The gradients of x [T, d_in] and, by key, of the factors, for the gradient g [T, d_out] of `add_delta`'s result.

    By torch's automatic differentiation. The gradient of x excludes that of the base layer.
    """
    leaf = x.detach().to(dtype).requires_grad_()
    copy = Site(site.name, site.d_in, site.d_out)
    for key in {lane.key for lane in plan.lanes} & site.factors.keys():
        copy.factors[key] = Factors(*(factor.detach().to(dtype).requires_grad_() for factor in site.factors[key]))
    wanted = [leaf, *(factor for factors in copy.factors.values() for factor in factors)]
    base = torch.zeros(g.shape, dtype=dtype, requires_grad=True)  # so that the sum has a gradient without any lane
    out = add_delta(base, leaf, copy, plan, dtype)
    dx, *rest = torch.autograd.grad(out, wanted, g.to(dtype), materialize_grads=True)
    return dx, {key: Factors(*rest[2 * place : 2 * place + 2]) for place, key in enumerate(copy.factors)}
