"""Gradients of deltas equal those of automatic differentiation through the specification, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atmm import Factors, Lane, SegmentPlan, Site, processor, reference
from atmm.gradients import delta_gradients
from tests.example_counts import scaled

RANKS = {"a": 1, "b": 4, "c": 24}
D_IN, D_OUT = 37, 40


def make_site(seed: int = 0) -> Site:
    generator = torch.Generator().manual_seed(seed)
    site = Site("layer", D_IN, D_OUT)
    for key, rank in RANKS.items():
        shapes = (rank, D_IN), (rank, D_OUT)
        site.factors[key] = Factors(*(torch.randn(shape, generator=generator) / 4 for shape in shapes))
    return site


def values(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of the base layer's input, that of the output, and the input."""
    generator = torch.Generator().manual_seed(num_tokens)
    dx, g, x = (torch.randn(num_tokens, width, generator=generator) for width in (D_IN, D_OUT, D_IN))
    return dx, g, x


@st.composite
def plans(draw: st.DrawFn) -> SegmentPlan:
    num_tokens = draw(st.sampled_from([1, 3, 33, 70]))
    lanes = []
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, num_tokens - 1))
        stop = draw(st.integers(start + 1, num_tokens))
        lanes.append(Lane(draw(st.sampled_from("abcd")), start, stop, draw(st.sampled_from([1.0, -1.0]))))
    return SegmentPlan(num_tokens, lanes)


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found - wanted).abs().max() <= 2e-6 * max(1.0, float(wanted.abs().max()))


@settings(max_examples=scaled(60))
@given(plan=plans(), needs_input=st.booleans())
def test_gradients_equal_the_specification(plan: SegmentPlan, needs_input: bool) -> None:
    """Lanes overlap, repeat an adapter, subtract, and name an adapter ("d") that does not target the site."""
    site, (dx, g, x) = make_site(), values(plan.num_tokens)
    expected_dx, expected = reference.delta_gradients(g, x, site, plan)
    before = dx.clone()
    found = delta_gradients(dx if needs_input else None, g, x, site, plan)
    assert_near(dx, before + expected_dx if needs_input else before)
    assert found.keys() == expected.keys()
    for key, factors in found.items():
        assert_near(factors.a, expected[key].a)
        assert_near(factors.bt, expected[key].bt)


def test_a_lane_with_nan_leaves_the_others_bit_for_bit() -> None:
    plan = SegmentPlan(30, [Lane("a", 0, 9), Lane("b", 9, 20), Lane("c", 20, 30)])
    site, (dx, g, x) = make_site(), values(30)
    alone = dx.clone()
    wanted = delta_gradients(alone, g, x, site, plan)
    site.factors["b"].a.fill_(torch.nan)
    g[9:20] = torch.inf
    found = delta_gradients(dx, g, x, site, plan)
    assert found["b"].a.isnan().all()
    for key in ("a", "c"):
        assert torch.equal(found[key].a, wanted[key].a) and torch.equal(found[key].bt, wanted[key].bt)
    assert torch.equal(dx[:9], alone[:9]) and torch.equal(dx[20:], alone[20:])


def test_the_specification_has_the_gradients_of_a_finite_difference() -> None:
    plan = SegmentPlan(12, [Lane("a", 0, 7), Lane("c", 5, 12, -1.0)])
    site, (_, g, x) = make_site(), values(12)
    _, gradients = reference.delta_gradients(g, x, site, plan)
    zero, step = torch.zeros(12, D_OUT), 0.5

    def total() -> float:
        return float((reference.add_delta(zero, x, site, plan) * g).sum())

    for key in ("a", "c"):
        for place, gradient in zip(site.factors[key], gradients[key], strict=True):
            place[0, 3] += step  # the sum is linear in one value
            above = total()
            place[0, 3] -= 2 * step
            assert (above - total()) / (2 * step) == pytest.approx(float(gradient[0, 3]), rel=1e-5, abs=1e-5)
            place[0, 3] += step


def test_tensors_that_do_not_fit_are_refused() -> None:
    plan = SegmentPlan(30, [Lane("a", 0, 9)])
    site, (dx, g, x) = make_site(), values(30)
    with pytest.raises(ValueError, match=r"layer: g has shape \(30, 37\)"):
        delta_gradients(dx, x, x, site, plan)
    with pytest.raises(ValueError, match=r"x is torch.bfloat16"):
        delta_gradients(dx, g, x.bfloat16(), site, plan)


def test_where_bfloat16_products_are_slow_gradients_are_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: False)
    site, given = make_site(), values(70)
    for key, factors in site.factors.items():
        site.factors[key] = Factors(*(each.bfloat16() for each in factors))
    dx, g, x = (each.bfloat16() for each in given)
    plan = SegmentPlan(70, [Lane("a", 0, 30), Lane("b", 30, 70), Lane("b", 10, 20, -1.0)])
    expected_dx, expected = reference.delta_gradients(g, x, site, plan)
    before = dx.double()
    found = delta_gradients(dx, g, x, site, plan)
    # dx is rounded once per lane that adds to it.
    assert (dx.double() - before - expected_dx).abs().max() <= 2 * 2**-8 * dx.double().abs().max()
    for key, factors in found.items():
        assert factors.a.dtype is torch.float32
        assert_near(factors.a, expected[key].a)
        assert_near(factors.bt, expected[key].bt)
