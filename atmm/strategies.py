"""Ways to add the deltas of one site, all with the meaning of `reference.add_delta`. `selection.py` chooses among them.

A bfloat16 matrix product on a CPU costs some 25 microseconds whatever its size, so the ways differ in how many they make:
`loop` two per lane, `stacked` one per group of sites and one per site, `batched` two per site.
"""

from __future__ import annotations

import torch

from atmm.segments import SegmentPlan
from atmm.sites import Packed, Site


def loop(y: torch.Tensor, x: torch.Tensor, site: Site, plan: SegmentPlan) -> None:
    """Lane after lane: shrink, then multiply-add into the lane's rows. Needs no packed copy; never wrong to choose."""
    for key, start, stop, sign in plan.lanes:
        factors = site.factors.get(key)
        if factors is not None:
            y[start:stop].addmm_(x[start:stop] @ factors.a.t(), factors.bt, alpha=sign)


def stacked(y: torch.Tensor, x: torch.Tensor, site: Site, plan: SegmentPlan) -> None:
    """All packed adapters for all tokens at once; a mask [T, R] keeps each token's own columns and carries the signs.

    The first site of a group shrinks for the whole group.
    """
    packed = site.group.packed
    assert packed is not None
    start, stop = packed.columns[site.place]
    if start == stop:
        return
    if len(packed.columns) == 1:
        h = x @ packed.a.t()
        h *= _mask(packed, plan, h)
    else:
        # Within a step each layer's group is read once per site, so the input's address tells one use from the next.
        owner, address, h = plan.memo.get("shrunk", (None, 0, None))
        if owner is not site.group or address != x.data_ptr():
            h = x @ packed.a.t()
            h *= _mask(packed, plan, h)
            # Holding x keeps its address from being given to another tensor while the entry lives.
            plan.memo["shrunk"] = (site.group, x.data_ptr(), h)
            plan.memo["shrunk_input"] = x
        h = h[:, start:stop]
    y.addmm_(h, packed.bts[site.place])


def batched(y: torch.Tensor, x: torch.Tensor, site: Site, plan: SegmentPlan) -> None:
    """One batched product over adapters, for plans whose lanes are even and adapters packed with one rank."""
    packed = site.group.packed
    assert packed is not None
    count = len(plan.lanes)
    start, stop = packed.columns[site.place]
    a = packed.a[start:stop].view(count, -1, site.d_in)
    bt = packed.bts[site.place].view(count, -1, site.d_out)
    h = torch.bmm(x.view(count, -1, site.d_in), a.transpose(1, 2))
    y.view(count, -1, site.d_out).baddbmm_(h, bt)


def _mask(packed: Packed, plan: SegmentPlan, like: torch.Tensor) -> torch.Tensor:
    """[T, R]: the sign of each token's lanes in the columns of their adapters, 0 elsewhere; one per layout and step."""
    mask = plan.memo.get(packed.layout)
    if mask is None:
        rows = torch.zeros(plan.num_tokens, len(packed.owners))
        place: dict[str, list[int]] = {}
        for column, (key, _) in enumerate(packed.owners):
            place.setdefault(key, []).append(column)
        for key, start, stop, sign in plan.lanes:
            rows[start:stop, place.get(key, [])] += sign
        repeats = torch.tensor([rank for _, rank in packed.owners])
        mask = rows.repeat_interleave(repeats, dim=1).to(dtype=like.dtype, device=like.device)
        plan.memo[packed.layout] = mask
    return mask
