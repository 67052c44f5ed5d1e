"""Matrix products against float64: linear layers by every method, shrink and expand apart, gradients, task heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from atmm import Factors, HeadRows, Lane, SegmentPlan, Site, head_logits, matmul, processor, reference
from atmm.cpu import library
from atmm.cpu.products import Weights, multiplies, product
from atmm.dispatch import is_thin
from atmm.gradients import delta_gradients
from atmm.shrink_expand import Expand, ExpandPart, Shrink, ShrinkPart
from tests.atmm.cases import bound, make_group, make_input
from tests.example_counts import scaled

TYPES = (torch.bfloat16, torch.float32)
needs_kernels = pytest.mark.skipif(library() is None, reason="no C++ compiler here")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- linear layers ----------------------------------------------------------------------------------------------------


def layers_of(d_in: int, widths: list[int], dtype: torch.dtype, *, bias: bool, pitch: int = 0) -> list[Weights]:
    """Random weights [d_out, d_in], with `pitch` elements between the rows."""
    return [
        Weights(
            drawn(width, d_in + pitch, seed=place).to(dtype)[:, :d_in],
            drawn(width, seed=99).to(dtype) if bias else None,
        )
        for place, width in enumerate(widths)
    ]


def expected(x: Tensor, layers: list[Weights]) -> Tensor:
    parts = [nn.functional.linear(x.double(), w.double(), None if b is None else b.double()) for w, b in layers]
    return torch.cat(parts, 1)


def assert_near(found: Tensor, right: Tensor) -> None:
    """Assert an error within the rounding of the result and of float32 sums."""
    error = 1e-5 + 2**-8 * right.abs() if found.dtype is torch.bfloat16 else 1e-5 + 1e-5 * right.abs()
    worst = ((found.double() - right).abs() - error * (1 + right.shape[1] ** 0.5)).max()
    assert found.shape == right.shape and worst <= 0, f"error exceeds rounding by {worst}"


@needs_kernels
@settings(max_examples=scaled(60))
@given(
    num_rows=st.integers(1, 37),
    d_in=st.integers(1, 200),
    widths=st.lists(st.integers(1, 130), min_size=1, max_size=3),
    dtype=st.sampled_from(TYPES),
    options=st.fixed_dictionaries({"bias": st.booleans(), "pitch": st.sampled_from((0, 3, 64))}),
    transposed=st.booleans(),
)
def test_kernels_multiply_any_shape(
    num_rows: int, d_in: int, widths: list[int], dtype: torch.dtype, options: dict[str, Any], transposed: bool
) -> None:
    layers = layers_of(d_in, widths, dtype, **options)
    x = drawn(num_rows, d_in, seed=1).to(dtype)
    x = x.t().contiguous().t() if transposed else x
    assert all(multiplies(weight) for weight, _ in layers)
    assert_near(product(x, layers), expected(x, layers))


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("num_rows", "d_in"), ((300, 2001), (33, 96))
)  # several blocks of tokens; whole tiles of weights
def test_kernels_multiply_many_rows(num_rows: int, d_in: int, dtype: torch.dtype) -> None:
    layers = layers_of(d_in, [64, 37], dtype, bias=True)
    x = drawn(num_rows, d_in, seed=1).to(dtype)
    assert_near(product(x, layers), expected(x, layers))


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_independent(dtype: torch.dtype) -> None:
    layers = layers_of(77, [50, 3], dtype, bias=True)
    x = drawn(19, 77).to(dtype)
    together = product(x, layers)
    for start, stop in ((0, 1), (3, 5), (4, 7), (2, 10), (0, 18)):
        assert torch.equal(product(x[start:stop], layers), together[start:stop])
    x[2, 39], x[4, 0] = float("nan"), float("inf")
    found = product(x, layers)
    assert found[2].isnan().all() and not found[4].isfinite().any()
    assert found[[0, 1, 3, *range(5, 19)]].isfinite().all()


@pytest.mark.parametrize("kernels", (True, False), ids=("compiled", "plain"))
@pytest.mark.parametrize("emulated", (True, False), ids=("no bfloat16", "bfloat16"))
@pytest.mark.parametrize("tiles", (True, False), ids=("tiles", "no tiles"))
@pytest.mark.parametrize("dtype", (*TYPES, torch.float16), ids=str)
def test_every_choice_gives_the_product(
    dtype: torch.dtype, tiles: bool, emulated: bool, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype is torch.bfloat16 and not (emulated or torch.ops.mkldnn._is_mkldnn_bf16_supported()):  # noqa: SLF001
        pytest.skip("oneDNN has no bfloat16 here")
    monkeypatch.setattr(processor, "flags", lambda: frozenset(["amx_bf16"] if tiles else ["avx512f"]))
    monkeypatch.setattr(processor, "vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: not emulated)
    monkeypatch.setattr(matmul, "has_tiles", lambda dtype: tiles and kernels and dtype is torch.bfloat16)
    monkeypatch.setattr(matmul, "BLOCK", 100)  # several blocks per weight
    if not kernels:
        monkeypatch.setattr(matmul, "multiplies", lambda weight: False)
    chosen = set()
    for bias in (False, True):
        layers = [nn.Linear(30, d_out, bias=bias, dtype=dtype) for d_out in (11, 4)]
        weights = [Weights(layer.weight, layer.bias) for layer in layers]
        for num_rows in (1, 2, 7, 50, 140):
            x = torch.randn(num_rows, 30).to(dtype)
            with torch.inference_mode():
                chosen.add(matmul.choose(num_rows, layers[0].weight))
                found = matmul.linears(x, layers)
                alone = matmul.linear(x[:, None], *weights[1])[:, 0]
            if dtype is torch.float16:
                torch.testing.assert_close(found.double(), expected(x, weights), rtol=1e-2, atol=1e-2)
            else:
                assert_near(found, expected(x, weights))
                assert_near(alone, expected(x, weights[1:]))
    if dtype is torch.float16:
        assert chosen == {"library"}
    fast = not emulated and not (tiles and kernels)
    assert ("onednn" in chosen) == (not tiles if dtype is torch.float32 else dtype is torch.bfloat16 and fast)
    if dtype is torch.bfloat16 and emulated:
        assert ("float32" in chosen) == (not (tiles and kernels))


def test_empty_batches_and_gradients_of_layers() -> None:
    layer = nn.Linear(5, 3)
    with torch.inference_mode():
        assert matmul.linear(torch.empty(0, 5), layer.weight, layer.bias).shape == (0, 3)
    x = torch.randn(2, 5, requires_grad=True)
    matmul.linear(x, layer.weight, layer.bias).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(2, 5))


@pytest.mark.parametrize(
    ("flags", "vendor", "supported", "fast"),
    (
        ({"avx512_bf16"}, "AuthenticAMD", True, True),
        ({"avx512_bf16"}, "GenuineIntel", True, False),
        ({"avx512_bf16", "amx_bf16"}, "GenuineIntel", True, True),
        ({"avx2"}, "AuthenticAMD", False, False),
        (set(), "", True, True),
    ),
)
def test_bfloat16_products_count_as_fast_by_processor(
    flags: set[str], vendor: str, supported: bool, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "flags", lambda: frozenset(flags))
    monkeypatch.setattr(processor, "vendor", lambda: vendor)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported, raising=False)
    processor.multiplies_bfloat16.cache_clear()
    try:
        assert processor.multiplies_bfloat16() is fast
    finally:
        processor.multiplies_bfloat16.cache_clear()


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (3, 70), (40, 90), (129, 33)])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_wide_product_in_blocks_is_added_to_every_value_once(
    rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "BLOCK_ROWS", 16)
    monkeypatch.setattr(matmul, "BLOCK_SUMS", 200)
    u, v, around = drawn(rows, 6), drawn(6, columns, seed=1), drawn(rows, columns + 4, seed=2).to(dtype)
    before = around.clone()
    matmul.add_product(around[:, 2:-2], u, v, alpha=-0.5)
    wanted = before.double()
    wanted[:, 2:-2] -= 0.5 * (u.double() @ v.double())
    torch.testing.assert_close(around.double(), wanted, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    assert torch.equal(around[:, :2], before[:, :2]) and torch.equal(around[:, -2:], before[:, -2:])


# -- shrink and expand apart, and gradients ---------------------------------------------------------------------------

RANKS = {"a": 4, "b": 8, "c": 24}


@st.composite
def plans(draw: st.DrawFn) -> SegmentPlan:
    """Lanes overlap, repeat an adapter, subtract, and name some that target no site or only that of gradients ("e")."""
    num_tokens = draw(st.sampled_from([1, 3, 31, 32, 33, 70]))  # the compiled kernels support up to 32
    lanes = []
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, num_tokens - 1))
        stop = draw(st.integers(start + 1, num_tokens))
        lanes.append(Lane(draw(st.sampled_from("abcde")), start, stop, draw(st.sampled_from([1.0, -1.0]))))
    return SegmentPlan(num_tokens, lanes)


@settings(max_examples=scaled(60))
@given(plans(), st.sampled_from([1, 2, 4]), st.sampled_from(TYPES), st.booleans(), st.booleans())
def test_shrink_and_expand_give_the_delta(
    plan: SegmentPlan, num_shares: int, dtype: torch.dtype, transposed: bool, fast: bool
) -> None:
    """Each share of the rank rows has separate hidden values, which are stored share after share."""
    group = make_group(RANKS, d_in=37, d_outs=(40, 16), dtype=dtype, missing=[("b", 1)])
    x, outputs = make_input(plan.num_tokens, group, dtype)
    if transposed:
        outputs = [y.t().contiguous().t() for y in outputs]
    lanes = [(site, lane) for site in group.sites for lane in plan.lanes if lane.key in site.factors]
    if not lanes:
        return
    with mock.patch.object(processor, "multiplies_bfloat16", lambda: fast):
        shares = [
            Shrink(
                [ShrinkPart(lane, site.factors[lane.key].a.chunk(num_shares)[share]) for site, lane in lanes],
                plan.num_tokens,
            )
            for share in range(num_shares)
        ]
        size = shares[0].size
        hidden = torch.cat([share(x) for share in shares])
        thin = is_thin(plan.num_tokens, x.device, dtype)
        assert hidden.dtype == (torch.float32 if thin else dtype) and len(hidden) == num_shares * size
        for site, y in zip(group.sites, outputs, strict=True):
            parts = [
                ExpandPart(lane, site.factors[lane.key].bt, [share * size + place for share in range(num_shares)])
                for (at, lane), place in zip(lanes, shares[0].places, strict=True)
                if at is site
            ]
            wanted = reference.add_delta(y, x, site, plan)
            # Hidden values are rounded once more than with a single call for both products.
            allowed = bound(y, x, site, plan) * (4 if dtype == torch.bfloat16 else 1)
            Expand(parts, plan.num_tokens)(y, hidden)
            assert bool(((y.double() - wanted).abs() <= allowed).all())


D_IN, D_OUT = 37, 40


def make_site(dtype: torch.dtype = torch.float32) -> Site:
    site = Site("layer", D_IN, D_OUT)
    for key, rank in {**RANKS, "e": 1}.items():
        site.factors[key] = Factors(*(drawn(rank, width, seed=width).to(dtype) / 4 for width in (D_IN, D_OUT)))
    return site


def values(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the base layer's input, that of the output, and the input."""
    return drawn(num_tokens, D_IN), drawn(num_tokens, D_OUT, seed=1), drawn(num_tokens, D_IN, seed=2)


def assert_equal_to_float32(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    for ours, right in zip(found, wanted, strict=True):
        assert (ours - right).abs().max() <= 2e-6 * max(1.0, float(right.abs().max()))


@settings(max_examples=scaled(60))
@given(plan=plans(), needs_input=st.booleans())
def test_gradients_equal_the_specification(plan: SegmentPlan, needs_input: bool) -> None:
    site, (dx, g, x) = make_site(), values(plan.num_tokens)
    expected_dx, wanted = reference.delta_gradients(g, x, site, plan)
    before = dx.clone()
    found = delta_gradients(dx if needs_input else None, g, x, site, plan)
    assert_equal_to_float32([dx], [before + expected_dx if needs_input else before])
    assert found.keys() == wanted.keys()
    for key, factors in found.items():
        assert_equal_to_float32(factors, wanted[key])


def test_where_bfloat16_products_are_slow_gradients_are_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: False)
    site, (dx, g, x) = make_site(torch.bfloat16), (each.bfloat16() for each in values(70))
    plan = SegmentPlan(70, [Lane("a", 0, 30), Lane("b", 30, 70), Lane("b", 10, 20, -1.0)])
    expected_dx, wanted = reference.delta_gradients(g, x, site, plan)
    before = dx.double()
    found = delta_gradients(dx, g, x, site, plan)
    # dx is rounded once per lane that adds to it.
    assert (dx.double() - before - expected_dx).abs().max() <= 2 * 2**-8 * dx.double().abs().max()
    for key, factors in found.items():
        assert factors.a.dtype is torch.float32
        assert_equal_to_float32(factors, wanted[key])


def test_a_lane_with_nan_leaves_the_others_bit_for_bit() -> None:
    plan = SegmentPlan(30, [Lane("a", 0, 9), Lane("b", 9, 20), Lane("c", 20, 30)])
    site, (dx, g, x) = make_site(), values(30)
    alone = dx.clone()
    wanted = delta_gradients(alone, g, x, site, plan)
    site.factors["b"].a.fill_(torch.nan)
    g[9:20] = torch.inf
    found = delta_gradients(dx, g, x, site, plan)
    assert found["b"].a.isnan().all()
    assert all(torch.equal(*pair) for key in "ac" for pair in zip(found[key], wanted[key], strict=True))
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


@pytest.mark.parametrize("fast", (True, False))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_gradient_of_an_input_is_added(dtype: torch.dtype, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: fast)
    monkeypatch.setattr(matmul, "BLOCK", 100)  # several blocks per weight
    for num_rows in (0, 1, 60):
        dx, g, weight = (drawn(*shape).to(dtype) for shape in ((num_rows, 30), (num_rows, 17), (17, 30)))
        wanted = dx.double() + g.double() @ weight.double()
        unset = torch.full_like(dx, torch.nan)
        matmul.add_input_gradient(unset, g, weight, beta=0)
        matmul.add_input_gradient(dx, g, weight)
        for found, expected_sum in ((dx, wanted), (unset, g.double() @ weight.double())):
            torch.testing.assert_close(found.double(), expected_sum, rtol=torch.finfo(dtype).eps, atol=1e-5)


# -- logits of task heads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), ((torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.2)))
def test_each_head_reads_its_own_rows(dtype: torch.dtype, tolerance: float) -> None:
    """A bias may have any stride; logits have the weight's type."""
    h = torch.randn(8, 32, dtype=dtype)
    heads = [
        HeadRows(torch.randn(5, 32, dtype=dtype), torch.randn(5, 3, dtype=dtype)[:, 1], torch.tensor([7, 0, 0])),
        HeadRows(torch.randn(1, 32, dtype=dtype), None, torch.tensor([3])),
        HeadRows(torch.randn(9, 32, dtype=dtype), torch.randn(9, dtype=dtype), torch.tensor([], dtype=torch.int64)),
    ]
    logits = head_logits(h, heads)
    assert [tuple(each.shape) for each in logits] == [(3, 5), (1, 1), (0, 9)]
    for each, right in zip(logits, reference.head_logits(h, heads), strict=True):
        assert each.dtype == dtype and torch.allclose(each.double(), right, atol=tolerance)
    first = heads[0]
    assert first.bias is not None
    by_hand = sum(h[7, i].double() * first.weight[2, i].double() for i in range(32)) + first.bias[2].double()
    assert abs(logits[0][0, 2].double() - by_hand) < tolerance
    assert head_logits(h.bfloat16(), heads[1:2])[0].dtype == dtype and head_logits(h, []) == []
