"""`add_delta` against the float64 reference: all strategies, dtypes, ranks, segments, overlaps and missing sites."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atmm import STRATEGIES, Lane, SegmentPlan, add_delta, add_deltas, processor, reference
from tests.atmm.cases import (
    RELATIVE,
    Batch,
    batches,
    bound,
    check_against_reference,
    check_group_against_reference,
    make_group,
    make_input,
    relative_error,
    segments,
)
from tests.example_counts import scaled

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

KINDS = {
    "one": (7, [Lane("a", 0, 7)]),
    "even": (12, segments({"a": 4, "b": 4, "c": 4})),
    "decode": (3, segments({"a": 1, "b": 1, "c": 1})),
    "ragged": (13, segments({"c": 8, "a": 1, "b": 4})),
    "short and long": (29, segments({"a": 1, "b": 24, "c": 4})),
    "empty segment": (6, segments({"a": 3, "b": 0, "c": 3})),
    "base tokens around": (12, segments({"b": 2, "c": 2}, start=5)),
    "base tokens between": (9, [Lane("a", 0, 2), Lane("b", 4, 6), Lane("a", 7, 9)]),
    "taken away": (5, [Lane("a", 0, 3, -1.0), Lane("b", 3, 5, -1.0)]),
    "mixed mode": (10, [Lane("a", 0, 3), Lane("b", 3, 5), Lane("c", 0, 5, -1.0), Lane("c", 8, 10, -1.0)]),
    "one adapter twice": (8, [Lane("a", 0, 5), Lane("a", 3, 8), Lane("b", 2, 4)]),
    "one adapter there and back": (6, [Lane("a", 0, 6), Lane("a", 2, 4, -1.0)]),
    "no lanes": (4, []),
    "no tokens": (0, []),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_agrees_with_the_reference(strategy: str, kind: str, dtype: torch.dtype) -> None:
    num_tokens, lanes = KINDS[kind]
    group = make_group({"a": 4, "b": 4, "c": 4}, dtype=dtype)
    group.pack("abc")
    x, outputs = make_input(num_tokens, group, dtype)
    moved = check_against_reference(group, SegmentPlan(num_tokens, lanes, strategy), x, outputs)
    assert moved > 4 or not lanes  # the deltas are well above the bound: a missing one would be detected


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("rank", (1, 4, 5, 8, 64))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank(strategy: str, rank: int, dtype: torch.dtype) -> None:
    group = make_group({"a": rank, "b": rank}, d_in=64, dtype=dtype)
    group.pack("ab")
    for lengths in ({"a": 1, "b": 1}, {"b": 2, "a": 9}):
        plan = SegmentPlan(sum(lengths.values()), segments(lengths), strategy)
        assert check_against_reference(group, plan, *make_input(plan.num_tokens, group, dtype)) > 1


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixed_ranks_and_missing_sites_in_one_batch(strategy: str, dtype: torch.dtype) -> None:
    missing = [("a", 0), ("b", 1), ("b", 2), ("c", 1)]
    group = make_group({"a": 1, "b": 64, "c": 5, "d": 8, "e": 4}, missing=missing, dtype=dtype)
    group.pack("abcde")
    plan = SegmentPlan(14, [*segments({"a": 2, "b": 1, "c": 4, "d": 2, "e": 3}), Lane("d", 0, 6, -1.0)], strategy)
    assert check_against_reference(group, plan, *make_input(14, group, dtype)) > 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_adapter_that_targets_no_site_of_the_group(strategy: str) -> None:
    group = make_group({"a": 4, "b": 4}, missing=[("b", 0), ("b", 1), ("b", 2)])
    group.pack("ab")
    plan = SegmentPlan(5, segments({"b": 2, "a": 3}), strategy)
    x, outputs = make_input(5, group, torch.float32)
    before = [y.clone() for y in outputs]
    check_against_reference(group, plan, x, outputs)
    assert all(torch.equal(y[:2], old[:2]) for y, old in zip(outputs, before, strict=True))
    alone = SegmentPlan(5, [Lane("b", 0, 5)], strategy)
    check_against_reference(group, alone, x, before)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_of_rank_zero(strategy: str) -> None:
    group = make_group({"a": 0, "b": 3})
    group.pack("ab")
    plan = SegmentPlan(4, segments({"a": 2, "b": 2}), strategy)
    check_against_reference(group, plan, *make_input(4, group, torch.float32))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packed_adapters_without_a_lane_add_nothing(strategy: str) -> None:
    group = make_group({"a": 4, "b": 8, "c": 4, "d": 2})
    group.pack("abcd")
    plan = SegmentPlan(6, [Lane("b", 1, 3), Lane("d", 3, 4)], strategy)
    assert check_against_reference(group, plan, *make_input(6, group, torch.float32)) > 4


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strided_views(strategy: str, dtype: torch.dtype) -> None:
    group = make_group({"a": 4, "b": 4}, dtype=dtype)
    for site in group.sites:
        for key, (a, bt) in site.factors.items():
            wide = torch.zeros(4, 100, dtype=dtype)
            wide[:, :48], wide[:, 50 : 50 + site.d_out] = a, bt
            site.factors[key] = site.factors[key]._replace(a=wide[:, :48], bt=wide[:, 50 : 50 + site.d_out])
    group.pack("ab")
    x, outputs = make_input(8, group, dtype)
    x_wide = torch.zeros(8, 60, dtype=dtype)
    x_wide[:, 5:53] = x
    y_wide = [torch.zeros(8, y.shape[1] + 9, dtype=dtype) for y in outputs]
    for view, y in zip(y_wide, outputs, strict=True):
        view[:, 3 : 3 + y.shape[1]] = y
    inner = [view[:, 3 : 3 + y.shape[1]] for view, y in zip(y_wide, outputs, strict=True)]
    plan = SegmentPlan(8, segments({"a": 4, "b": 4}), strategy)
    assert check_against_reference(group, plan, x_wide[:, 5:53], inner) > 4
    for view, y in zip(y_wide, inner, strict=True):
        y.zero_()
        assert (view == 0).all()  # nothing was written outside of the outputs


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, None])
def test_outputs_that_lie_transposed(strategy: str | None, kind: str, dtype: torch.dtype) -> None:
    num_tokens, lanes = KINDS[kind]
    group = make_group({"a": 4, "b": 4, "c": 4}, missing=[("b", 1)], dtype=dtype)
    group.pack("abc")
    x, outputs = make_input(num_tokens, group, dtype)
    columns = [y.t().contiguous().t() for y in outputs]
    moved = check_against_reference(group, SegmentPlan(num_tokens, lanes, strategy), x.t().contiguous().t(), columns)
    assert moved > 4 or not lanes


@pytest.mark.parametrize("features", ((), ("amx_bf16",)), ids=("plain", "tiles"))
@pytest.mark.parametrize("kind", KINDS)
def test_shrinks_with_the_factors_on_either_side(
    kind: str, features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "flags", lambda: frozenset(features))
    num_tokens, lanes = KINDS[kind]
    group = make_group({"a": 4, "b": 4, "c": 4}, dtype=torch.bfloat16)
    group.pack("abc")
    plan = SegmentPlan(num_tokens, lanes, "stacked")
    assert check_against_reference(group, plan, *make_input(num_tokens, group, torch.bfloat16)) > 4 or not lanes


@pytest.mark.parametrize("strategy", [*STRATEGIES, None])
def test_one_row_of_a_transposed_output(strategy: str | None) -> None:
    group = make_group({"a": 4}, dtype=torch.bfloat16)
    group.pack("a")
    x, outputs = make_input(1, group, torch.bfloat16)
    rows = [y.expand(2, -1).t().contiguous().t()[:1] for y in outputs]
    assert check_against_reference(group, SegmentPlan(1, [Lane("a", 0, 1)], strategy), x, rows) > 4


def test_sites_without_a_group_or_a_packed_copy() -> None:
    group = make_group({"a": 4, "b": 8}, missing=[("b", 1)])
    plan = SegmentPlan(6, [Lane("a", 0, 4), Lane("b", 3, 6), Lane("a", 4, 6, -1.0)])
    assert check_against_reference(group, plan, *make_input(6, group, torch.float32)) > 4


def test_an_adapter_that_is_not_packed_is_still_applied() -> None:
    group = make_group({"a": 4, "b": 8})
    group.pack("a")
    plan = SegmentPlan(6, segments({"a": 3, "b": 3}))
    assert check_against_reference(group, plan, *make_input(6, group, torch.float32)) > 4


@pytest.mark.parametrize("inference", (True, False))
def test_one_plan_serves_layers_packed_differently(inference: bool) -> None:
    plan = SegmentPlan(6, segments({"a": 2, "b": 4}))
    with torch.inference_mode(inference):
        for seed, keys in enumerate(("ab", "ba", "ab", "", "a")):
            group = make_group({"a": 4, "b": 3}, seed=seed)
            group.pack(keys)
            assert check_against_reference(group, plan, *make_input(6, group, torch.float32)) > 4


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflowing_adapter_affects_only_its_own_tokens(strategy: str, dtype: torch.dtype) -> None:
    group = make_group({"a": 4, "b": 4}, d_outs=(16,), dtype=dtype)
    site = group.sites[0]
    site.factors["b"] = site.factors["b"]._replace(a=torch.full((4, 48), torch.finfo(dtype).max, dtype=dtype))
    group.pack("ab")
    x, outputs = make_input(4, group, dtype)
    y = outputs[0].clone()
    add_delta(y, x.abs(), site, SegmentPlan(4, [Lane("a", 0, 2), Lane("b", 3, 4)], strategy))
    assert y[:3].isfinite().all()
    assert not y[3].isfinite().any()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("packed", ("abc", "a", ""))
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_group_at_once(kind: str, packed: str, transposed: bool, dtype: torch.dtype) -> None:
    num_tokens, lanes = KINDS[kind]
    group = make_group({"a": 4, "b": 3, "c": 8}, missing=[("b", 1)], dtype=dtype)
    group.pack(packed)
    plan = SegmentPlan(num_tokens, lanes)
    check_group_against_reference(group, plan, *make_input(num_tokens, group, dtype), transposed)


def test_outputs_that_are_not_side_by_side_are_refused() -> None:
    group = make_group({"a": 4})
    plan = SegmentPlan(3, [Lane("a", 0, 3)])
    for y in (torch.zeros(3, 71), torch.zeros(72, 3), torch.zeros(216)):
        with pytest.raises(ValueError, match=r"a plan of 3 tokens expects \[3, 72\]"):
            add_deltas(y, torch.zeros(3, 48), group, plan)


KEYS = "abcdef"


@st.composite
def plans(draw: st.DrawFn) -> tuple[dict[str, int], list[tuple[str, int]], str, int, list[Lane]]:
    ranks = {key: draw(st.integers(0, 9)) for key in KEYS}
    pairs = list(itertools.product(KEYS, range(3)))
    missing = draw(st.lists(st.sampled_from(pairs), max_size=8))
    packed = "".join(draw(st.permutations(KEYS)))
    num_tokens = draw(st.integers(0, 12))
    edges = st.integers(0, num_tokens)
    lane = st.builds(
        lambda key, edge, other, sign: Lane(key, min(edge, other), max(edge, other), sign),
        st.sampled_from(KEYS), edges, edges, st.sampled_from((1.0, -1.0)),
    )  # fmt: skip
    return ranks, missing, packed, num_tokens, draw(st.lists(lane, max_size=8))


@pytest.mark.slow
@settings(max_examples=scaled(120))
@given(plans(), st.sampled_from([*STRATEGIES, None]), st.booleans())
def test_any_plan_agrees_with_the_reference(case: tuple, strategy: str | None, inference: bool) -> None:
    ranks, missing, packed, num_tokens, lanes = case
    with torch.inference_mode(inference):
        group = make_group(ranks, d_in=13, d_outs=(7, 3, 7), missing=missing, dtype=torch.float64)
        group.pack(packed)
        plan = SegmentPlan(num_tokens, lanes, strategy)
        check_against_reference(group, plan, *make_input(num_tokens, group, torch.float64))


@pytest.mark.slow
@settings(max_examples=scaled(150))
@given(batches(), st.sampled_from([*STRATEGIES, None]), st.sampled_from(list(RELATIVE)))
def test_any_batch_is_within_its_error(batch: Batch, strategy: str | None, dtype: torch.dtype) -> None:
    assert relative_error(batch, strategy, dtype) <= RELATIVE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", [*STRATEGIES, None])
def test_every_strategy_agrees_with_the_reference_on_cuda(strategy: str | None) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype, (num_tokens, lanes) in itertools.product(FLOATS, KINDS.values()):
        group = make_group({"a": 4, "b": 4, "c": 4}, dtype=dtype, device="cuda")
        group.pack("abc")
        x, outputs = make_input(num_tokens, group, dtype, "cuda")
        check_against_reference(group, SegmentPlan(num_tokens, lanes, strategy), x, outputs)


def test_the_reference_adds_nothing_outside_the_lanes() -> None:
    group = make_group({"a": 4})
    x, outputs = make_input(6, group, torch.float32)
    plan = SegmentPlan(6, [Lane("a", 2, 4)])
    moved = reference.add_delta(outputs[0], x, group.sites[0], plan) - outputs[0].double()
    assert (moved[[0, 1, 4, 5]] == 0).all()
    a, bt = group.sites[0].factors["a"]
    zero = torch.zeros(())
    by_hand = torch.stack(
        [sum((a[r].double() @ x[t].double() * bt[r].double() for r in range(4)), zero) for t in (2, 3)]
    )
    assert torch.allclose(moved[2:4], by_hand)
    assert (bound(outputs[0], x, group.sites[0], plan) > 0).all()
