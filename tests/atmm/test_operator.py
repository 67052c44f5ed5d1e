"""The operator against a float64 reference, for every strategy, type and shape of batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import atmm
from atmm import STRATEGIES, Factors, HeadRows, Lane, SegmentPlan, Site, SiteGroup
from tests.example_counts import scaled

D_IN = 24
OUT = (40, 16, 16)
RANKS = {"a": 4, "b": 8, "c": 64, "d": 1, "e": 5}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

BATCHES: dict[str, tuple[int, list[Lane]]] = {
    "one adapter": (9, [Lane("b", 0, 9)]),
    "even": (8, [Lane("a", 0, 2), Lane("b", 2, 4), Lane("c", 4, 6), Lane("d", 6, 8)]),
    "even, equal ranks apart": (6, [Lane("a", 0, 3), Lane("a", 3, 6)]),
    "ragged": (20, [Lane("c", 0, 1), Lane("a", 1, 14), Lane("e", 14, 20)]),
    "base tokens between": (12, [Lane("a", 2, 5), Lane("b", 9, 12)]),
    "mixed mode": (12, [Lane("a", 0, 4), Lane("b", 4, 7), Lane("c", 0, 9, -1.0)]),
    "one token": (1, [Lane("c", 0, 1)]),
    "empty lane": (5, [Lane("a", 3, 3), Lane("b", 0, 5)]),
    "no lanes": (5, []),
}


def make_group(dtype: torch.dtype, packed: bool, missing: bool = False) -> SiteGroup:
    """Three sites on one input. missing: adapter b does not target the second site."""
    generator = torch.Generator().manual_seed(0)
    sites = tuple(Site(f"site{i}", D_IN, d_out) for i, d_out in enumerate(OUT))
    for index, site in enumerate(sites):
        for key, rank in RANKS.items():
            if missing and key == "b" and index == 1:
                continue
            a = torch.randn(rank, D_IN, generator=generator) / D_IN**0.5
            bt = torch.randn(rank, site.d_out, generator=generator) / rank**0.5
            site.factors[key] = Factors(a.to(dtype), bt.to(dtype))
    group = SiteGroup(sites)
    if packed:
        group.pack(tuple(RANKS), None)
    return group


def expected(y: torch.Tensor, x: torch.Tensor, site: Site, lanes: list[Lane]) -> torch.Tensor:
    out = y.double()
    for lane in lanes:
        if lane.key in site.factors:
            a, bt = site.factors[lane.key]
            rows = slice(lane.start, lane.stop)
            out[rows] += lane.sign * (x[rows].double() @ a.double().t()) @ bt.double()
    return out


def check(group: SiteGroup, num_tokens: int, lanes: list[Lane], strategy: str | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    plan = SegmentPlan(num_tokens, lanes, strategy)
    # Twice: a plan serves every layer of a step, and the second input must not use the shrink of the first.
    for _ in range(2):
        x = torch.randn(num_tokens, D_IN, generator=generator).to(dtype)
        for site in group.sites:
            y = torch.randn(num_tokens, site.d_out, generator=generator).to(dtype)
            want = expected(y, x, site, lanes)
            atmm.add_delta(y, x, site, plan)
            torch.testing.assert_close(y.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
@pytest.mark.parametrize("batch", BATCHES)
def test_packed(batch: str, strategy: str | None, dtype: torch.dtype) -> None:
    check(make_group(dtype, packed=True), *BATCHES[batch], strategy, dtype)


@pytest.mark.parametrize("batch", BATCHES)
def test_without_a_packed_copy(batch: str) -> None:
    check(make_group(torch.float32, packed=False), *BATCHES[batch], None, torch.float32)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_adapters_that_miss_a_site(strategy: str | None, packed: bool) -> None:
    if packed or strategy is None:
        for batch in ("even", "mixed mode", "one adapter"):
            check(make_group(torch.float32, packed, missing=True), *BATCHES[batch], strategy, torch.float32)


def test_a_lone_site_needs_no_group() -> None:
    site = Site("alone", D_IN, 16)
    site.factors["a"] = Factors(torch.randn(3, D_IN), torch.randn(3, 16))
    x, y = torch.randn(4, D_IN), torch.randn(4, 16)
    want = expected(y, x, site, [Lane("a", 0, 4)])
    atmm.add_delta(y, x, site, SegmentPlan(4, [Lane("a", 0, 4)]))
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


def test_after_unpacking_the_packed_copy_is_not_read() -> None:
    group = make_group(torch.float32, packed=False)
    buffer = torch.zeros(group.packed_bytes(tuple(RANKS)), dtype=torch.uint8)
    group.pack(tuple(RANKS), buffer)
    check(group, *BATCHES["ragged"], None, torch.float32)
    group.unpack()
    buffer.fill_(255)  # NaN in every float type
    check(group, *BATCHES["ragged"], None, torch.float32)


def test_infinity_in_one_adapter_does_not_spread() -> None:
    group = make_group(torch.float32, packed=False)
    for site in group.sites:
        site.factors["c"].a.fill_(float("inf"))
    group.pack(tuple(RANKS), None)
    check(group, 6, [Lane("a", 0, 3), Lane("b", 3, 6)], "stacked", torch.float32)


@settings(max_examples=scaled(60))
@given(
    num_tokens=st.integers(1, 33),
    cuts=st.lists(st.tuples(st.sampled_from(sorted(RANKS)), st.integers(0, 33), st.integers(0, 33)), max_size=6),
    merged=st.sampled_from([None, *sorted(RANKS)]),
    packed=st.booleans(),
)
def test_any_plan(num_tokens: int, cuts: list[tuple[str, int, int]], merged: str | None, packed: bool) -> None:
    lanes = [
        Lane(key, min(first, second, num_tokens), min(max(first, second), num_tokens)) for key, first, second in cuts
    ]
    if merged is not None:
        lanes.append(Lane(merged, 0, num_tokens, -1.0))
    check(make_group(torch.float32, packed), num_tokens, lanes, None, torch.float32)


@pytest.mark.parametrize("lane", [Lane("a", -1, 3), Lane("a", 2, 99), Lane("a", 3, 2), Lane("a", 0, 2, 0.5)])
def test_invalid_lanes_are_refused(lane: Lane) -> None:
    with pytest.raises(ValueError, match="lane"):
        SegmentPlan(5, [lane])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_merge_is_rounded_once(dtype: torch.dtype, in_place: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    base = torch.randn(3, 32, 24, generator=generator).to(dtype)
    # Strided views, as in the memory arena.
    a = torch.randn(3, 2, 8, 24, generator=generator).to(dtype)[:, 1]
    bt = torch.randn(3, 2, 8, 32, generator=generator).to(dtype)[:, 0] * 0.1
    want = base.double() + 0.5 * bt.double().transpose(1, 2) @ a.double()
    out = base if in_place else torch.empty_like(base)
    atmm.merge(out, base, a, bt, 0.5)
    # One unit in the last place: the sum has the product's precision and is rounded once.
    limit = torch.finfo(dtype).eps * want.abs().clamp(min=torch.finfo(dtype).tiny)
    assert bool(((out.double() - want).abs() <= limit + 4 * torch.finfo(torch.float32).eps).all())


def test_merge_says_which_shapes_do_not_fit() -> None:
    base = torch.zeros(2, 6, 4)
    with pytest.raises(ValueError, match=r"\(2, 3, 5\)"):
        atmm.merge(base, base, torch.zeros(2, 3, 5), torch.zeros(2, 3, 6))


def test_heads_read_their_own_rows() -> None:
    hidden = torch.randn(7, 12)
    heads = [
        HeadRows(torch.randn(3, 12), torch.randn(3), torch.tensor([0, 6])),
        HeadRows(torch.randn(5, 12), None, torch.tensor([2])),
    ]
    logits = atmm.head_logits(hidden, heads)
    for made, head in zip(logits, heads, strict=True):
        want = hidden[head.index].double() @ head.weight.double().t()
        if head.bias is not None:
            want = want + head.bias.double()
        torch.testing.assert_close(made.double(), want, rtol=1e-5, atol=1e-5)
