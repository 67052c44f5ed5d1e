"""The table of kernels: groups, batches and plans, and the error bound of a result against the float64 reference.

Tests of this folder run on the CPU's strategies. `test_triton.py` runs the files of kernels that Triton has too in a
process in which its interpreter replaces the compiler; there `STRATEGIES` are tilings of the Triton kernels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import atmm
from atmm import Factors, Lane, SegmentPlan, Site, SiteGroup, add_delta, add_deltas, cpu, reference
from atmm.layers import Layout
from atmm.segments import BatchStats

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
STRATEGIES: tuple[str | None, ...] = (*atmm.STRATEGIES, None)
DTYPES: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
if INTERPRETED:
    STRATEGIES = ("tiled", "tiled m16 n64 k64 s2 p2", "tiled m32 n128 k64 s0 p2")
    DTYPES = DTYPES[1:]
needs_compiler = pytest.mark.skipif(INTERPRETED or cpu.library() is None, reason="no C++ compiler here")
of_the_cpu = pytest.mark.skipif(INTERPRETED, reason="not a kernel of Triton")

# A result takes few calls, with sums in float32 or better: a few roundings of the absolute sum bound the error. The
# interpreter truncates float32 to bfloat16 instead of rounding, and hidden values are truncated once more.
ROUNDINGS = {torch.float64: 64, torch.float32: 16, torch.bfloat16: 3 if INTERPRETED else 1, torch.float16: 2}


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


def stats_of(
    ranks: dict[str, int], lanes: list[Lane], *, num_tokens: int | None = None, on_gpu: bool = False, **options: Any
) -> BatchStats:
    """Statistics of a group with all adapters packed; on a GPU without their tensors."""
    group = make_group(ranks, **options)
    group.pack(ranks)
    assert group.packed is not None
    layout = group.packed.layout
    if on_gpu:
        spans = tuple(tuple(site.values()) for site in layout.spans)
        layout = Layout(layout.keys, spans, layout.d_in, layout.d_outs, layout.dtype, torch.device("cuda"))
    return BatchStats(
        SegmentPlan(max(lane.stop for lane in lanes) if num_tokens is None else num_tokens, lanes), layout
    )


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


def inside(rows: Tensor, gap: int) -> Tensor:
    """The rows with `gap` elements of NaN around each."""
    room = torch.full((len(rows), rows.shape[1] + 2 * gap), math.nan, dtype=rows.dtype, device=rows.device)
    return room[:, gap : gap + rows.shape[1]].copy_(rows)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory of torch holds NaN."""
    plain = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        made = plain(*size, **options)
        if made.is_floating_point():
            return made.fill_(math.nan)
        return made if made.dtype is torch.bool else made.fill_(torch.iinfo(made.dtype).max)

    with mock.patch.object(torch, "empty", empty):
        yield


class Batch(NamedTuple):
    """A drawn case. missing: (adapter, site) pairs without factors. gap: elements between rows."""

    ranks: dict[str, int]
    missing: list[tuple[str, int]]
    lanes: list[Lane]
    num_tokens: int
    d_in: int
    d_outs: tuple[int, ...]
    gap: int


@st.composite
def batches(draw: st.DrawFn, most_adapters: int = 64, multiple: int = 1) -> Batch:
    """Adapters of ranks 0 to 256 in ragged segments, some empty, with base tokens between them.

    In some cases lanes that overlap these add or subtract adapters. Sizes are multiples of `multiple`.
    """
    count = draw(st.one_of(st.integers(1, 4), st.integers(5, most_adapters)))
    rank = st.one_of(st.sampled_from((0, 8, 16, 64)), st.integers(0, 256 // multiple).map(lambda n: n * multiple))
    ranks = {str(key): draw(rank) for key in range(count)}
    sign = st.sampled_from((1.0, 1.0, -1.0))
    lanes: list[Lane] = []
    at = 0
    for key in ranks:
        at += draw(st.sampled_from((0, 0, 0, 2)))
        length = draw(st.sampled_from((0, 1, 1, 2, 5, 19)))
        lanes.append(Lane(key, at, at + length, draw(sign)))
        at += length
    num_tokens = at + draw(st.integers(0, 2))
    for _ in range(draw(st.sampled_from((0, 0, 1, 4)))):
        start, stop = sorted((draw(st.integers(0, num_tokens)), draw(st.integers(0, num_tokens))))
        lanes.append(Lane(draw(st.sampled_from(sorted(ranks))), start, stop, draw(sign)))
    width = st.sampled_from((1, 7, 16, 33, 64) if multiple == 1 else (8, 24, 40, 64))
    d_outs = tuple(draw(st.lists(width, min_size=1, max_size=3)))
    sites = st.tuples(st.sampled_from(sorted(ranks)), st.integers(0, len(d_outs) - 1))
    missing = draw(st.lists(sites, max_size=4))
    return Batch(ranks, missing, lanes, num_tokens, draw(width), d_outs, draw(st.sampled_from((0, 3, 8))))


def check_batch(
    batch: Batch,
    strategy: str | None,
    dtype: torch.dtype,
    *,
    whole: bool = False,
    packed: Collection[str] | None = None,
) -> None:
    """Check a drawn batch with NaN between all rows, and in all bytes that are not written. packed: all by default."""
    group = make_group(batch.ranks, d_in=batch.d_in, d_outs=batch.d_outs, missing=batch.missing, dtype=dtype)
    for site in group.sites:
        for key, (a, bt) in site.factors.items():
            site.factors[key] = Factors(inside(a, batch.gap), inside(bt, batch.gap))
    keys = list(batch.ranks) if packed is None else list(packed)
    group.pack(keys, torch.full((group.packed_bytes(keys),), 0xFF, dtype=torch.uint8))
    plan = SegmentPlan(batch.num_tokens, batch.lanes, strategy if group.packed is not None else None)
    x, outputs = make_input(batch.num_tokens, group, dtype)
    x, *outputs = (inside(tensor, batch.gap) for tensor in (x, *outputs))
    with poisoned_memory():
        if whole:
            check_group_against_reference(group, plan, x, outputs)
        else:
            check_against_reference(group, plan, x, outputs)
