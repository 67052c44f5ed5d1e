"""Separate shrink and expand give the same delta, for all kernels and numbers of shares of the hidden values."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atmm import Lane, SegmentPlan, processor, reference
from atmm.shrink_expand import Expand, ExpandPart, Shrink, ShrinkPart, hidden_dtype
from tests.atmm.cases import bound, make_group, make_input
from tests.example_counts import scaled

RANKS = {"a": 4, "b": 8, "c": 24}


@st.composite
def plans(draw: st.DrawFn) -> SegmentPlan:
    num_tokens = draw(st.sampled_from([1, 3, 31, 32, 33, 70]))  # the compiled kernels support up to 32
    lanes = []
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, num_tokens - 1))
        stop = draw(st.integers(start + 1, num_tokens))
        lanes.append(Lane(draw(st.sampled_from("abc")), start, stop, draw(st.sampled_from([1.0, -1.0]))))
    return SegmentPlan(num_tokens, lanes)


@settings(max_examples=scaled(60))
@given(
    plan=plans(),
    num_shares=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
    fast=st.booleans(),
)
def test_shrink_and_expand_give_the_delta(
    plan: SegmentPlan, num_shares: int, dtype: torch.dtype, transposed: bool, fast: bool
) -> None:
    """Each share of the rank rows has separate hidden values, which are stored share after share."""
    with mock.patch.object(processor, "multiplies_bfloat16", lambda: fast):
        check_shares(plan, num_shares, dtype, transposed)


def check_shares(plan: SegmentPlan, num_shares: int, dtype: torch.dtype, transposed: bool) -> None:
    group = make_group(RANKS, d_in=37, d_outs=(40, 16), dtype=dtype, missing=[("b", 1)])
    x, outputs = make_input(plan.num_tokens, group, dtype)
    if transposed:
        outputs = [y.t().contiguous().t() for y in outputs]
    lanes = [(site, lane) for site in group.sites for lane in plan.lanes if lane.key in site.factors]
    shares = [
        Shrink(
            [ShrinkPart(lane, site.factors[lane.key].a.chunk(num_shares)[share]) for site, lane in lanes],
            plan.num_tokens,
        )
        for share in range(num_shares)
    ]
    hidden = torch.cat([share(x) for share in shares])
    assert hidden.dtype == hidden_dtype(plan.num_tokens, x.device, dtype) and len(hidden) == num_shares * shares[0].size
    for site, y in zip(group.sites, outputs, strict=True):
        parts = [
            ExpandPart(lane, site.factors[lane.key].bt, [share * shares[0].size + place for share in range(num_shares)])
            for (at, lane), place in zip(lanes, shares[0].places, strict=True)
            if at is site
        ]
        wanted = reference.add_delta(y, x, site, plan)
        # Hidden values are rounded once more than with a single call for both products.
        allowed = bound(y, x, site, plan) * (4 if dtype == torch.bfloat16 else 1)
        Expand(parts, plan.num_tokens)(y, hidden)
        assert bool(((y.double() - wanted).abs() <= allowed).all())


def test_mismatched_arguments_are_refused_before_memory_is_read() -> None:
    group = make_group(RANKS, d_in=16, d_outs=(8,))
    factors, lane = group.sites[0].factors["a"], Lane("a", 0, 3)
    shrink = Shrink([ShrinkPart(lane, factors.a)], 3)
    with pytest.raises(ValueError, match=r"\(2, 16\) values of torch.float32 do not fit 3 tokens"):
        shrink(torch.zeros(2, 16))
    with pytest.raises(ValueError, match=r"factors of torch\.float32 in rows of 16; prepare"):
        shrink(torch.zeros(3, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"\(3, 15\) values .*in rows of 16"):
        shrink(torch.zeros(3, 15))
    with pytest.raises(ValueError, match="do not fit 3 tokens"):
        Expand([ExpandPart(lane, factors.bt, [0])], 3)(torch.zeros(4, 8), shrink(torch.zeros(3, 16)))
    with pytest.raises(ValueError, match=r"factors of torch\.bfloat16 in rows of 16 and torch\.float32 in"):
        Shrink([ShrinkPart(lane, factors.a), ShrinkPart(lane, factors.a.bfloat16())], 3)
