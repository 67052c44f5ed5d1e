"""Random groups, plans and the bound within which a result of a given dtype must agree with the float64 reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atmm import Factors, Lane, SegmentPlan, Site, SiteGroup, add_delta, reference

# Calls per result are few, sums are kept in float32 at least: a few roundings of the absolute sum bound the error.
ROUNDINGS = {torch.float64: 64, torch.float32: 16, torch.bfloat16: 1, torch.float16: 2}


def make_group(
    ranks: Mapping[str, int],
    *,
    d_in: int = 48,
    d_outs: Sequence[int] = (40, 16, 16),
    missing: Sequence[tuple[str, int]] = (),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> SiteGroup:
    """A group with random factors of every adapter at every site, except the (adapter, site index) pairs in
    `missing`."""
    generator = torch.Generator().manual_seed(seed)
    group = SiteGroup([Site(f"site{index}", d_in, d_out) for index, d_out in enumerate(d_outs)])
    for key, rank in ranks.items():
        for index, site in enumerate(group.sites):
            if (key, index) not in missing:
                a = torch.randn(rank, d_in, generator=generator) * d_in**-0.5
                bt = torch.randn(rank, site.d_out, generator=generator) * max(rank, 1) ** -0.5
                site.factors[key] = Factors(a.to(device, dtype), bt.to(device, dtype))
    return group


def make_input(
    num_tokens: int, group: SiteGroup, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, list[Tensor]]:
    """x, and y of every site."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, group.sites[0].d_in, generator=generator).to(device, dtype)
    return x, [torch.randn(num_tokens, site.d_out, generator=generator).to(device, dtype) for site in group.sites]


def bound(y: Tensor, x: Tensor, site: Site, plan: SegmentPlan) -> Tensor:
    """Elementwise bound on the error of `y + deltas` computed in y's dtype."""
    absolute = Site(site.name, site.d_in, site.d_out)
    absolute.factors = {key: Factors(a.abs(), bt.abs()) for key, (a, bt) in site.factors.items()}
    lanes = [lane._replace(sign=1.0) for lane in plan.lanes]
    total = reference.add_delta(y.abs(), x.abs(), absolute, SegmentPlan(plan.num_tokens, lanes))
    return ROUNDINGS[y.dtype] * torch.finfo(y.dtype).eps * total


def check_against_reference(group: SiteGroup, plan: SegmentPlan, x: Tensor, outputs: Sequence[Tensor]) -> float:
    """Run every site of the group and compare. Returns how far the reference moved y, in units of the bound."""
    moved = 0.0
    for site, y in zip(group.sites, outputs, strict=True):
        expected = reference.add_delta(y, x, site, plan)
        allowed = bound(y, x, site, plan)
        before = y.to(torch.float64, copy=True)
        add_delta(y, x, site, plan)
        error = (y.double() - expected).abs()
        assert (error <= allowed).all(), f"{site.name}: error {(error / allowed).max():.1f} times the bound"
        if y.numel():
            moved = max(moved, ((expected - before).abs() / allowed).max().item())
    return moved


def segments(lengths: Mapping[str, int], *, start: int = 0) -> list[Lane]:
    """One lane per adapter, one after the other."""
    lanes = []
    for key, length in lengths.items():
        lanes.append(Lane(key, start, start + length))
        start += length
    return lanes
