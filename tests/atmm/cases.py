"""Random groups and plans, and the error bound of a result of a given dtype against the float64 reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from atmm import Factors, Lane, SegmentPlan, Site, SiteGroup, add_delta, add_deltas, reference

# A result takes few calls, with sums in float32 or better: a few roundings of the absolute sum bound the error.
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


def check_against_reference(
    group: SiteGroup, plan: SegmentPlan, x: Tensor, outputs: Sequence[Tensor], label: str = ""
) -> float:
    """Run every site of the group and compare. Returns the largest change of y by the reference, in units of the
    bound. label: of the case, for messages."""
    moved = 0.0
    for site, y in zip(group.sites, outputs, strict=True):
        expected = reference.add_delta(y, x, site, plan)
        allowed = bound(y, x, site, plan)
        before = y.to(torch.float64, copy=True)
        add_delta(y, x, site, plan)
        error = (y.double() - expected).abs()
        assert (error <= allowed).all(), f"{label} {site.name}: error {(error / allowed).max():.1f} times the bound"
        if y.numel():
            moved = max(moved, ((expected - before).abs() / allowed).max().item())
    return moved


def check_group_against_reference(
    group: SiteGroup, plan: SegmentPlan, x: Tensor, outputs: Sequence[Tensor], transposed: bool = False, label: str = ""
) -> None:
    """The same for all sites at once, in one y inside a larger tensor. transposed: y is column-major."""
    widths = [site.d_out for site in group.sites]
    shape = len(x), sum(widths) + 9
    room = torch.full(shape[::-1] if transposed else shape, float("nan"), dtype=x.dtype, device=x.device)
    room = room.t() if transposed else room
    y = room[:, 4 : 4 + sum(widths)]
    y.copy_(torch.cat(list(outputs), 1))
    add_deltas(y, x, group, plan)
    for site, before, after in zip(group.sites, outputs, y.split(widths, 1), strict=True):
        error = (after.double() - reference.add_delta(before, x, site, plan)).abs()
        allowed = bound(before, x, site, plan)
        assert (error <= allowed).all(), f"{label} {site.name}: error {(error / allowed).max():.1f} times the bound"
    assert room[:, :4].isnan().all() and room[:, 4 + sum(widths) :].isnan().all()


def segments(lengths: Mapping[str, int], *, start: int = 0) -> list[Lane]:
    """One lane per adapter, one after the other."""
    lanes = []
    for key, length in lengths.items():
        lanes.append(Lane(key, start, start + length))
        start += length
    return lanes


KINDS: dict[str, tuple[int, list[Lane]]] = {
    "one": (40, [Lane("a", 0, 40)]),
    "one token": (1, [Lane("c", 0, 1)]),
    "even": (12, segments({"a": 4, "b": 4, "c": 4})),
    "decode": (3, segments({"a": 1, "b": 1, "c": 1})),
    "ragged": (40, segments({"c": 33, "a": 1, "b": 6})),
    "short and long": (29, segments({"a": 1, "b": 24, "c": 4})),
    "empty segment": (40, segments({"c": 33, "a": 0, "b": 7})),
    "base tokens around": (12, segments({"b": 2, "c": 2}, start=5)),
    "base tokens between": (9, [Lane("a", 0, 2), Lane("b", 4, 6), Lane("a", 7, 9)]),
    "taken away": (5, [Lane("a", 0, 3, -1.0), Lane("b", 3, 5, -1.0)]),
    "mixed mode": (22, [Lane("a", 0, 18), Lane("b", 18, 20), Lane("c", 0, 20, -1.0), Lane("c", 20, 22, -1.0)]),
    "one adapter twice": (8, [Lane("a", 0, 5), Lane("a", 3, 8), Lane("b", 2, 4)]),
    "one adapter there and back": (6, [Lane("a", 0, 6), Lane("a", 2, 4, -1.0)]),
    "three at once": (6, [Lane("a", 0, 6), Lane("b", 1, 4), Lane("c", 2, 5, -1.0)]),
    "no lanes": (4, []),
    "no tokens": (0, []),
}
"""Tokens and lanes of batches with up to three adapters."""


def lay_in_arena(group: SiteGroup, gap: int) -> None:
    """Move every factor to separate memory, with `gap` elements of NaN around each row."""
    for site in group.sites:
        for key, factors in site.factors.items():
            site.factors[key] = Factors(*(_poisoned_around(rows, gap) for rows in factors))


def _poisoned_around(rows: Tensor, gap: int) -> Tensor:
    count, width = rows.shape
    arena = torch.full((count * (width + gap) + gap,), float("nan"), dtype=rows.dtype, device=rows.device)
    own = arena[gap:].view(count, width + gap)[:, :width]
    return own.copy_(rows)


class Batch(NamedTuple):
    """A drawn case: each adapter's rank, its lanes and tokens, the sizes of a layer, and the gap between rows."""

    ranks: dict[str, int]
    lanes: list[Lane]
    num_tokens: int
    d_in: int
    d_outs: tuple[int, ...]
    gap: int


@st.composite
def batches(draw: st.DrawFn, most_adapters: int = 64) -> Batch:
    """1 to `most_adapters` adapters of ranks 1 to 256 in ragged segments, some empty, with base tokens between them.

    In some cases, a lane with sign -1 subtracts one adapter from a range of tokens, which may include its own.
    """
    count = draw(st.one_of(st.integers(1, 4), st.integers(5, most_adapters)))
    rank = st.one_of(st.sampled_from((1, 8, 16, 64, 256)), st.integers(1, 256))
    ranks = {str(key): draw(rank) for key in range(count)}
    lanes: list[Lane] = []
    at = 0
    for key in ranks:
        at += draw(st.sampled_from((0, 0, 0, 2)))
        length = draw(st.sampled_from((0, 1, 1, 2, 5, 19)))
        lanes.append(Lane(key, at, at + length))
        at += length
    num_tokens = at + draw(st.integers(0, 2))
    if draw(st.booleans()):
        start, stop = sorted((draw(st.integers(0, num_tokens)), draw(st.integers(0, num_tokens))))
        lanes.append(Lane(draw(st.sampled_from(sorted(ranks))), start, stop, -1.0))
    width = st.sampled_from((1, 7, 16, 33, 64))
    return Batch(ranks, lanes, num_tokens, draw(width), (draw(width), draw(width)), draw(st.sampled_from((0, 3, 8))))


RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest allowed error relative to the largest value."""


def relative_error(batch: Batch, strategy: str | None, dtype: torch.dtype) -> float:
    """Add the deltas of a drawn batch. Returns the largest error of any site relative to its largest expected value."""
    group = make_group(batch.ranks, d_in=batch.d_in, d_outs=batch.d_outs, dtype=dtype)
    lay_in_arena(group, batch.gap)
    group.pack(batch.ranks)
    x, outputs = make_input(batch.num_tokens, group, dtype)
    plan = SegmentPlan(batch.num_tokens, batch.lanes, strategy)
    worst = 0.0
    for site, y in zip(group.sites, outputs, strict=True):
        right = reference.add_delta(y, x, site, plan)
        add_delta(y, x, site, plan)
        error = (y.double() - right).abs()
        assert error.isfinite().all(), f"{site.name}: unused memory was read"
        if y.numel():
            worst = max(worst, (error.max() / right.abs().max()).item())
    return worst
