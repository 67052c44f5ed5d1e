"""`add_delta` and `add_deltas` against the float64 reference: strategies, types, shapes, memory layouts and batches."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atmm import (
    Factors,
    Lane,
    SegmentPlan,
    Site,
    SiteGroup,
    add_delta,
    add_deltas,
    cpu,
    gains_from_copies,
    processor,
    reference,
)
from atmm.cpu.lanes import Compiled, Scattered
from atmm.cpu.products import has_tiles
from atmm.strategies import hybrid, registry
from atmm.strategies.hybrid import SHORT
from tests.atmm.cases import (
    DTYPES,
    INTERPRETED,
    KINDS,
    STRATEGIES,
    Batch,
    batches,
    bound,
    check_against_reference,
    check_batch,
    check_group_against_reference,
    make_group,
    make_input,
    needs_compiler,
    of_the_cpu,
    segments,
)
from tests.example_counts import scaled

COMPILED = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")


class Shape(NamedTuple):
    """Sizes of a group: ranks, and sites that an adapter does not target."""

    ranks: dict[str, int]
    missing: tuple[tuple[str, int], ...] = ()
    d_in: int = 48


SHAPES = {
    "equal": Shape({"a": 4, "b": 4, "c": 4}),
    "odd": Shape(
        {"a": 3, "b": 8, "c": 17, "elsewhere": 5}, (("b", 1), ("a", 0), *(("elsewhere", i) for i in range(3))), 37
    ),
    "wide": Shape({"b": 1, "c": 128, "a": 5, "none": 0}, (("c", 2),), 300),
}
LAYOUTS = ("rows", "columns", "group", "group of columns")[: 3 if INTERPRETED else 4]  # not all on a GPU
READS_IN_PLACE = (None, "loop", "divided")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_agrees_with_the_reference(strategy: str | None, shape: str, dtype: torch.dtype) -> None:
    """Each kind of batch, packed and read in place. Layouts of x and y take turns, in the interpreter also kinds."""
    ranks, missing, d_in = SHAPES[shape]
    turn = list(SHAPES).index(shape) + DTYPES.index(dtype)
    in_place = strategy in READS_IN_PLACE or (
        strategy == "compiled" and dtype in COMPILED and cpu.library() is not None
    )
    for number, (kind, (num_tokens, lanes)) in enumerate(KINDS.items()):
        if INTERPRETED and (number + turn) % 5:
            continue
        layout = LAYOUTS[(turn + number) % len(LAYOUTS)]
        for packed in (ranks, "ab", "") if in_place else (ranks,):
            group = make_group(ranks, d_in=d_in, missing=missing, dtype=dtype)
            group.pack(packed)
            label = f"{kind}, {layout}, packed {packed}:"
            lanes = [*lanes, *(Lane(key, 0, num_tokens // 2) for key in ranks.keys() - set("abc"))]
            plan = SegmentPlan(num_tokens, lanes, strategy)
            x, outputs = make_input(num_tokens, group, dtype)
            if "columns" in layout:
                x = x.t().contiguous().t()
            if "group" in layout:
                check_group_against_reference(group, plan, x, outputs, "columns" in layout, label)
                continue
            if layout == "columns":
                outputs = [y.t().contiguous().t() for y in outputs]
            moved = check_against_reference(group, plan, x, outputs, label)
            assert moved > 1 or not KINDS[kind][1], f"{label} the deltas are below the bound"


@of_the_cpu
@pytest.mark.parametrize("kind", KINDS)
def test_shrinks_with_the_factors_on_the_left(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor with tiles."""
    monkeypatch.setattr(processor, "flags", lambda: frozenset(("amx_bf16",)))
    num_tokens, lanes = KINDS[kind]
    group = make_group({"a": 4, "b": 4, "c": 4}, dtype=torch.bfloat16)
    group.pack("abc")
    plan = SegmentPlan(num_tokens, lanes, "stacked")
    assert check_against_reference(group, plan, *make_input(num_tokens, group, torch.bfloat16)) > 1 or not lanes


@pytest.mark.parametrize("dtype", COMPILED, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_single_row_may_have_any_strides(strategy: str | None, dtype: torch.dtype) -> None:
    group = make_group({"a": 4}, dtype=dtype)
    group.pack("a")
    x, outputs = make_input(1, group, dtype)
    rows = [y.expand(2, -1).t().contiguous().t()[:1] for y in outputs]
    assert check_against_reference(group, SegmentPlan(1, [Lane("a", 0, 1)], strategy), x, rows) > 1


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("strategy", [strategy for strategy in STRATEGIES if strategy])
def test_an_overflowing_adapter_affects_only_its_own_tokens(strategy: str, dtype: torch.dtype) -> None:
    group = make_group({"a": 4, "b": 4, "idle": 4}, d_outs=(16,), dtype=dtype)
    site = group.sites[0]
    for key, value in (("b", torch.finfo(dtype).max), ("idle", float("inf"))):
        site.factors[key] = site.factors[key]._replace(a=torch.full((4, 48), value, dtype=dtype))
    group.pack(("a", "b", "idle"))
    x, outputs = make_input(4, group, dtype)
    y = outputs[0].clone()
    add_delta(y, x.abs(), site, SegmentPlan(4, [Lane("a", 0, 2), Lane("b", 3, 4)], strategy))
    assert y[:3].isfinite().all()
    assert not y[3].isfinite().any()


@of_the_cpu
@pytest.mark.parametrize(("rank", "d_in", "d_out"), [(5, 255, 33), (1, 64, 7), (16, 65, 70), (33, 96, 300)])
def test_a_token_depends_on_no_other_of_its_lane(rank: int, d_in: int, d_out: int) -> None:
    """By matrix tiles: not on values that are not finite, nor on their number, in no bit."""
    if not has_tiles(torch.bfloat16):
        pytest.skip("this processor has no matrix tiles")
    draws = torch.Generator().manual_seed(rank)
    x = torch.randn(70, d_in, generator=draws).bfloat16()
    site = Site("site", d_in, d_out)
    site.factors["a"] = Factors(*(torch.randn(rank, size, generator=draws).bfloat16() for size in (d_in, d_out)))

    def deltas(x: Tensor) -> Tensor:
        y = torch.zeros(len(x), d_out, dtype=x.dtype)
        add_delta(y, x, site, SegmentPlan(len(x), [Lane("a", 0, len(x))]))
        return y

    whole = deltas(x)
    spoiled = x.clone()
    spoiled[40] = torch.inf
    rows = [number for number in range(70) if number != 40]
    assert torch.equal(deltas(spoiled)[rows], whole[rows])
    for length in range(SHORT + 1, 70):
        assert torch.equal(deltas(x[:length]), whole[:length])


@pytest.mark.parametrize("inference", (True, False))
def test_one_plan_serves_layers_of_any_packing_and_type(inference: bool) -> None:
    plan = SegmentPlan(49, [*segments({"a": 4, "b": 45}), Lane("a", 20, 22, -1.0)])
    with torch.inference_mode(inference):
        for seed, (keys, dtype) in enumerate(itertools.product(("ab", "ba", "", "a"), DTYPES)):
            group = make_group({"a": 4, "b": 3}, missing=[("b", 1)], dtype=dtype, seed=seed)
            group.pack(keys)
            assert check_against_reference(group, plan, *make_input(49, group, dtype)) > 1
        alone = Site("alone", 48, 16)
        alone.factors.update(group.sites[2].factors)
        y, x = torch.zeros(49, 16, dtype=torch.float16), make_input(49, group, torch.float16)[0]
        allowed, right = bound(y, x, alone, plan), reference.add_delta(y, x, alone, plan)
        add_delta(y, x, alone, plan)
        assert ((y.double() - right).abs() <= allowed).all() and right.abs().max() > 1


@pytest.mark.slow
@settings(max_examples=12 if INTERPRETED else scaled(300))
@given(
    batches(16 if INTERPRETED else 64),
    st.sampled_from(STRATEGIES),
    st.sampled_from(DTYPES),
    st.sampled_from(("all", "half", "none")),
    st.booleans(),
    st.booleans(),
)
def test_any_batch_agrees_with_the_reference(
    batch: Batch, strategy: str | None, dtype: torch.dtype, packed: str, whole: bool, inference: bool
) -> None:
    keys = list(batch.ranks)
    some = {"all": keys, "half": keys[::-2], "none": []}[packed if strategy is None else "all"]
    with torch.inference_mode(inference):
        check_batch(batch, strategy, dtype, whole=whole, packed=some)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_agrees_with_the_reference_on_cuda(strategy: str | None) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype, (kind, (num_tokens, lanes)) in itertools.product(DTYPES, KINDS.items()):
        group = make_group({"a": 4, "b": 4, "c": 4}, dtype=dtype, device="cuda")
        group.pack("abc")
        x, outputs = make_input(num_tokens, group, dtype, "cuda")
        check_against_reference(group, SegmentPlan(num_tokens, lanes, strategy), x, outputs, kind)


@of_the_cpu
def test_the_reference_adds_nothing_outside_the_lanes() -> None:
    group = make_group({"a": 4})
    x, outputs = make_input(6, group, torch.float32)
    plan = SegmentPlan(6, [Lane("a", 2, 4)])
    moved = reference.add_delta(outputs[0], x, group.sites[0], plan) - outputs[0].double()
    assert (moved[[0, 1, 4, 5]] == 0).all()
    a, bt = group.sites[0].factors["a"]
    zero = torch.zeros(())
    by_hand = [sum((a[r].double() @ x[t].double() * bt[r].double() for r in range(4)), zero) for t in (2, 3)]
    assert torch.allclose(moved[2:4], torch.stack(by_hand))
    assert (bound(outputs[0], x, group.sites[0], plan) > 0).all()


# -- one shrink for the sites of a group ------------------------------------------------------------------------------

SHARING = pytest.mark.parametrize("strategy", () if INTERPRETED else ("stacked", "gathered"))
PLAN = 5, segments({"a": 3, "b": 2})


def add_to_zeros(group: SiteGroup, index: int, x: Tensor, plan: SegmentPlan) -> None:
    site = group.sites[index]
    y = torch.zeros(x.shape[0], site.d_out, dtype=x.dtype)
    add_delta(y, x, site, plan)
    expected = reference.add_delta(torch.zeros_like(y), x, site, plan)
    assert torch.allclose(y.double(), expected, atol=1e-4)
    assert expected.abs().max() > 0.1


def packed_group(seed: int = 0) -> SiteGroup:
    group = make_group({"a": 4, "b": 8}, seed=seed)
    group.pack("ab")
    return group


@SHARING
@pytest.mark.parametrize("inference", (True, False))
def test_one_shrink_serves_a_group_once_per_layer_and_releases_its_input(
    strategy: str, inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrinks: list[tuple[int, ...]] = []  # the shape of the packed A of each

    def counted(product: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
        def counting(*given: Tensor) -> Tensor:
            shrinks.append(tuple(given[place].shape))
            return product(*given)

        return counting

    monkeypatch.setattr(registry.F, "linear", counted(torch.nn.functional.linear, 1))
    monkeypatch.setattr(registry.torch, "mm", counted(torch.mm, 0))
    plan = SegmentPlan(*PLAN, strategy)
    with torch.inference_mode(inference):
        for layer in range(3):
            group = packed_group(layer)
            x, _ = make_input(5, group, torch.float32)
            for index in range(3):
                add_to_zeros(group, index, x[None][0], plan)  # a new view each time, as modules create them
            held = weakref.ref(x)
            del x
            assert held() is None
    assert shrinks == [(36, 48)] * 3


@SHARING
@pytest.mark.parametrize("inference", (True, False))
def test_a_shared_shrink_is_never_stale(strategy: str, inference: bool) -> None:
    """Sites come in any order or not at all, of two groups, with inputs that are new, freed, or views of one memory.

    Without inference mode, inputs are also written, and groups packed again in between; else torch counts no writes.
    """
    plan, groups = SegmentPlan(*PLAN, strategy), (packed_group(), packed_group(1))
    draws = random.Random(0)
    with torch.inference_mode(inference):
        x = torch.randn(5, 48)
        for _ in range(200):
            kind = draws.randrange(3 if inference else 5)
            if kind == 0:
                x = torch.randn(5, 48)  # freed memory is reused: the address alone must not decide
            elif kind == 1:
                x = x[None][0]
            elif kind == 3:
                x.mul_(-1)
            elif kind == 4:
                for site, source in zip(groups[0].sites, groups[1].sites, strict=True):
                    site.factors, source.factors = source.factors, site.factors
                for group in groups:
                    group.pack("ab")
            add_to_zeros(draws.choice(groups), draws.randrange(3), x, plan)
        square, whole = torch.randn(48, 48), SegmentPlan(48, [Lane("a", 0, 48)], strategy)
        for index, view in enumerate((square, square.t(), square)):
            add_to_zeros(groups[0], index, view, whole)


# -- factors read in place on a CPU -----------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("packed", ("abc", "ab", ""))
def test_the_compiled_kernels_read_packed_copies_only_if_they_are_complete(packed: str) -> None:
    group = make_group({"a": 3, "b": 8, "c": 17})
    group.pack(packed)
    plan = SegmentPlan(17, segments({"a": 5, "b": 5, "c": 7}), "compiled")
    assert check_against_reference(group, plan, *make_input(17, group, torch.float32)) > 1
    assert {type(each) for each in plan.prepared.values()} == {Compiled if packed == "abc" else Scattered}


@needs_compiler
def test_adapters_are_read_at_their_current_address() -> None:
    group = make_group({"a": 4, "b": 8}, missing=[("b", 1)])
    site = group.sites[0]
    plan = SegmentPlan(5, [*segments({"a": 2, "b": 3}), Lane("c", 1, 4, -1.0)], "compiled")
    for change in (
        lambda: None,
        lambda: site.factors.update(a=Factors(torch.randn(6, site.d_in), torch.randn(6, site.d_out))),
        lambda: site.factors.update(a=Factors(*(factor.t().contiguous().t() for factor in site.factors["a"]))),
        lambda: site.factors["a"].a.mul_(2),  # in place, without contiguous rows
        lambda: site.factors.update(a=Factors(torch.empty(0, site.d_in), torch.empty(0, site.d_out))),
        lambda: site.factors.pop("a"),
        lambda: site.factors.update(c=Factors(torch.randn(2, site.d_in), torch.randn(2, site.d_out))),
    ):
        change()
        assert check_against_reference(group, plan, *make_input(5, group, torch.float32)) > 0


@needs_compiler
def test_addresses_of_factors_are_shared_by_all_plans() -> None:
    group = make_group({"a": 4, "b": 8, "c": 3})
    known = {key: factors.rows for key, factors in group.sites[0].factors.items()}
    for lanes in (segments({"a": 1, "b": 4}), segments({"b": 2, "c": 3}), [Lane("c", 0, 5), Lane("a", 1, 3, -1.0)]):
        assert check_against_reference(group, SegmentPlan(5, lanes), *make_input(5, group, torch.float32)) > 0
    assert all(rows is not None and group.sites[0].factors[key].rows is rows for key, rows in known.items())


@needs_compiler
@pytest.mark.parametrize("packed", ("", "a"))
@pytest.mark.parametrize("dtype", COMPILED, ids=str)
def test_factors_at_odd_addresses(dtype: torch.dtype, packed: str) -> None:
    group = make_group({"a": 5}, dtype=dtype)
    for site in group.sites:
        odd = []
        for factor in site.factors["a"]:
            room = torch.zeros(factor.nbytes + 1, dtype=torch.uint8)
            room[1:] = factor.reshape(-1).view(torch.uint8)
            odd.append(torch.frombuffer(room.numpy(), dtype=dtype, offset=1).view(factor.shape))
            assert odd[-1].data_ptr() % factor.element_size()
        site.factors["a"] = Factors(*odd)
    group.pack(packed)
    x, outputs = make_input(3, group, dtype)
    assert check_against_reference(group, SegmentPlan(3, [Lane("a", 0, 3)]), x, outputs) > 0


@needs_compiler
def test_columns_of_one_value_and_empty_factors_count_as_rows() -> None:
    site = Site("site", 1, 5)
    site.factors["a"] = Factors(torch.randn(1, 3).t(), torch.randn(3, 5))
    site.factors["b"] = Factors(torch.empty(1, 0).t(), torch.empty(5, 0).t())
    group = SiteGroup([site])
    plan = SegmentPlan(4, [Lane("a", 0, 2), Lane("b", 2, 4)])
    assert check_against_reference(group, plan, *make_input(4, group, torch.float32)) > 0
    assert all(factors.rows is not None for factors in site.factors.values())


@needs_compiler
@pytest.mark.parametrize("together", (False, True))
def test_long_lanes_are_checked_once_per_site(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(hybrid, "check_reads", lambda site, key, *_: looked.append(f"{site.name} {key}"))
    group = make_group({"short": 4, "long": 8})
    for lengths in ({"short": 4, "long": 36}, {"short": 4, "long": 2}):
        plan = SegmentPlan(sum(lengths.values()), segments(lengths))
        x, outputs = make_input(plan.num_tokens, group, torch.float32)
        if together:
            add_deltas(torch.cat(outputs, 1), x, group, plan)
        else:
            for site, y in zip(group.sites, outputs, strict=True):
                add_delta(y, x, site, plan)
    assert looked == [f"{site.name} long" for site in group.sites]


@needs_compiler
@pytest.mark.parametrize("fast", (True, False))
def test_copies_are_for_several_long_lanes_in_a_type_with_fast_products(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: fast)
    decoding = segments({f"a{place}": 1 for place in range(64)})
    beside_a_prompt = [*decoding, Lane("b", 64, 164)]
    assert not gains_from_copies(decoding, CPU, torch.bfloat16)
    assert not gains_from_copies(beside_a_prompt, CPU, torch.bfloat16)
    prompts = [*beside_a_prompt, Lane("c", 164, 164 + SHORT + 1)]
    assert gains_from_copies(prompts, CPU, torch.bfloat16) == (fast and not has_tiles(torch.bfloat16))
    assert gains_from_copies(prompts, CPU, torch.float32)
    assert gains_from_copies(decoding, torch.device("meta"), torch.bfloat16)  # no compiled kernels on this device


@needs_compiler
@pytest.mark.parametrize("packed", ("abc", ""))
@pytest.mark.parametrize("dtype", COMPILED, ids=str)
def test_the_number_of_threads_changes_no_bit(packed: str, dtype: torch.dtype) -> None:
    """Parts of an adapter's rows and of its features are computed by different threads."""
    group = make_group({"a": 3, "b": 8, "c": 17}, d_in=96, dtype=dtype)
    group.pack(packed)
    threads = torch.get_num_threads()
    apart = [Lane("a", 0, 1), Lane("b", 1, 3), Lane("c", 3, 4)]
    for lanes in ([Lane("c", 0, 1)], apart, [*apart[:2], Lane("c", 0, 4, -1.0)]):
        x, outputs = make_input(4, group, dtype)
        found = []
        try:
            for count in (1, 2, 3, 7):
                torch.set_num_threads(count)
                found.append([y.clone() for y in outputs])
                assert check_against_reference(group, SegmentPlan(4, lanes, "compiled"), x, found[-1]) > 1
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(one, other) for ys in found for one, other in zip(found[0], ys, strict=True))
