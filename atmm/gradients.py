"""The backward pass of `add_delta`: gradients of a layer's input and of every lane's factors.

For `y += sign * (x a^T) bt` and the gradient g of y, by lane: with du = sign * g bt^T, the gradient of x gains du a,
that of a is du^T x, and that of bt is sign * (x a^T)^T g. Hidden values x a^T are computed again and not kept, since
they are as wide as the rank only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atmm.layers import Factors, Site, check_reads
from atmm.matmul import add_product, widened
from atmm.segments import SegmentPlan


def delta_gradients(dx: Tensor | None, g: Tensor, x: Tensor, site: Site, plan: SegmentPlan) -> dict[str, Factors]:
    """Gradients of the deltas that `add_delta` added at a site.

    Lanes are independent: values that are not finite in one lane do not reach another.

    Args:
        dx: [T, d_in], to which the gradient of the input is added in place; None if it is not needed.
        g: [T, d_out], the gradient of the layer's output; contiguous rows.
        x: [T, d_in], the layer's input; contiguous rows.
        site: the layer, with the factors of the forward pass.
        plan: the lanes of the forward pass.

    Returns:
        The gradients of the factors of each adapter with a lane, by key: [r, d_in] and [r, d_out]; in float32 where
        products of the factors' type are slower.

    Raises:
        ValueError: if a tensor does not fit the plan or the site; raised before anything is computed.
    """
    _check(dx, g, x, site, plan)
    found: dict[str, Factors] = {}
    for key, start, stop, sign in plan.lanes:
        factors = site.factors.get(key)
        if factors is None:
            continue
        a, bt, own, gradient = widened(*factors, x[start:stop], g[start:stop])
        slope = F.linear(gradient, bt)
        hidden = F.linear(own, a)
        if dx is not None:
            add_product(dx[start:stop], slope, a, alpha=sign)
        if key in found:
            found[key].a.addmm_(slope.t(), own, alpha=sign)
            found[key].bt.addmm_(hidden.t(), gradient, alpha=sign)
            continue
        made = Factors(torch.mm(slope.t(), own), torch.mm(hidden.t(), gradient))
        if sign < 0:
            for each in made:
                each.neg_()
        found[key] = made
    return found


def _check(dx: Tensor | None, g: Tensor, x: Tensor, site: Site, plan: SegmentPlan) -> None:
    wanted = {"x": (x, site.d_in), "g": (g, site.d_out)} | ({} if dx is None else {"dx": (dx, site.d_in)})
    for name, (tensor, width) in wanted.items():
        if tensor.shape != (plan.num_tokens, width):
            raise ValueError(
                f"{site.name}: {name} has shape {tuple(tensor.shape)}; the plan and the site need "
                f"({plan.num_tokens}, {width})"
            )
    for key in plan.keys & site.factors.keys():
        check_reads(site, key, site.factors[key], x)
