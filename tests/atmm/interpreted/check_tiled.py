"""The Triton kernels in the interpreter, against the float64 reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from atmm import Factors, FactorTable, Lane, SegmentPlan, SiteGroup, add_deltas, begin_deltas, reference
from atmm.fp8 import Fp8
from atmm.quantized import QuantizedWeight
from atmm.triton import kernels
from atmm.triton.handles import Handle, handle
from atmm.triton.lanes import InPlace, SingleLaunch, Tiled
from atmm.triton.merging import merge, merge_rows
from atmm.tuning import search
from atmm.tuning.search import Case, Shape, kernel_samples
from tests.atmm.cases import (
    KINDS,
    RELATIVE,
    ROUNDINGS,
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

KERNELS = {
    "tiled": Tiled,
    "tiled m16 n64 k64 s2 p2": Tiled,
    "tiled m32 n128 k64 s0 p2": SingleLaunch,
}


@pytest.fixture(autouse=True)
def _interpreter_rounds_down(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter truncates float32 to bfloat16 instead of rounding, and hidden values are truncated once more.
    monkeypatch.setitem(ROUNDINGS, torch.bfloat16, 3)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", KERNELS)
def test_every_kind_of_batch(strategy: str, kind: str) -> None:
    """Types take turns."""
    num_tokens, lanes = KINDS[kind]
    dtype = DTYPES[(list(KERNELS).index(strategy) + list(KINDS).index(kind)) % len(DTYPES)]
    group = make_group({"a": 4, "b": 17, "c": 64}, dtype=dtype)
    group.pack("abc")
    plan = SegmentPlan(num_tokens, lanes, strategy)
    assert check_against_reference(group, plan, *make_input(num_tokens, group, dtype)) > 1 or not lanes
    assert all(isinstance(prepared, KERNELS[strategy]) for prepared in plan.prepared.values())


@pytest.mark.parametrize(
    ("d_outs", "dtype"),
    [
        ((256, 128, 128), torch.float32),
        ((256, 128, 128), torch.bfloat16),
        ((40, 130, 16), torch.float32),
        ((128,), torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", KERNELS)
def test_a_whole_group_at_once(
    strategy: str, d_outs: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group({"a": 4, "b": 17, "c": 64}, d_outs=d_outs, missing=[("a", 0)], dtype=dtype)
    group.pack("abc")
    launches: Counter[str] = Counter()
    handle.cache_clear()
    for name in ("shrink", "expand", "single"):
        monkeypatch.setattr(kernels, name, Counted(name, getattr(kernels, name), launches))
    for kind in ("ragged", "base tokens around", "three at once"):
        launches.clear()
        num_tokens, lanes = KINDS[kind]
        plan = SegmentPlan(num_tokens, lanes, strategy)
        check_group_against_reference(group, plan, *make_input(num_tokens, group, dtype), label=kind)
        assert launches == ({"single": 1} if KERNELS[strategy] is SingleLaunch else {"shrink": 1, "expand": 1})
    handle.cache_clear()


class Counted(NamedTuple):
    """A kernel that counts its launches."""

    name: str
    kernel: Any
    launches: Counter[str]

    def __getitem__(self, grid: Any) -> Any:
        self.launches[self.name] += 1
        return self.kernel[grid]


@pytest.mark.parametrize("d_in", (37, 300, 1024))
@pytest.mark.parametrize("rank", (1, 8, 33, 128))
@pytest.mark.parametrize("strategy", ("tiled", "tiled m16 n64 k64 s0 p2"))
def test_odd_shapes_and_split_sums(strategy: str, rank: int, d_in: int) -> None:
    group = make_group({"a": rank, "b": rank + 3}, d_in=d_in, d_outs=(40, 130, 16))
    group.pack("ab")
    plan = SegmentPlan(9, segments({"a": 4, "b": 5}), strategy)
    assert check_against_reference(group, plan, *make_input(9, group, torch.float32)) > 1


@pytest.mark.parametrize("strategy", KERNELS)
def test_forty_adapters_and_sites_that_one_does_not_target(strategy: str) -> None:
    keys = [str(number) for number in range(40)]
    group = make_group({key: 1 + number % 5 for number, key in enumerate(keys)}, d_in=16, d_outs=(16,))
    group.pack(keys)
    plan = SegmentPlan(40, segments(dict.fromkeys(keys, 1)), strategy)
    assert check_against_reference(group, plan, *make_input(40, group, torch.float32)) > 1
    group = make_group({"a": 4, "b": 8}, missing=[("a", 0), ("b", 1), ("b", 2)])
    group.pack("ab")
    plan = SegmentPlan(5, segments({"a": 2, "b": 3}), strategy)
    assert check_against_reference(group, plan, *make_input(5, group, torch.float32)) > 1


def test_uninitialized_memory_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty

    def poisoned(*size: int, **options: object) -> torch.Tensor:
        return plain(*size, **options).fill_(float("nan"))  # type: ignore[call-overload]

    group = make_group({"a": 5, "b": 40})
    group.pack("ab")
    monkeypatch.setattr("atmm.triton.lanes.torch.empty", poisoned)
    plan = SegmentPlan(7, segments({"a": 3, "b": 4}), "tiled")
    x, outputs = make_input(7, group, torch.float32)
    assert check_against_reference(group, plan, x, outputs) > 1


class Captured(NamedTuple):
    """A launch of a graph, which is repeated with the same kernel, grid and addresses."""

    kernel: Handle
    given: tuple[Any, ...]

    def replay(self) -> None:
        self.kernel(*self.given)


@contextmanager
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Captured]]:
    """The launches within the context, which also run."""
    captured: list[Captured] = []
    launch = Handle.__call__

    def capturing_launch(self: Handle, *given: Any) -> None:
        captured.append(Captured(self, given))
        launch(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Handle, "__call__", capturing_launch)
        yield captured


@pytest.mark.parametrize("strategy", KERNELS)
def test_a_captured_graph_uses_the_current_lanes(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group({"a": 4, "b": 17, "c": 64}, missing=[("b", 1)])
    group.pack("abc")
    plan = SegmentPlan(22, [], strategy, room=5)
    x, outputs = make_input(22, group, torch.float32)
    before = torch.cat(outputs, 1)
    y = before.clone()
    with capturing(monkeypatch) as captured:
        add_deltas(y, x, group, plan)
    assert captured and torch.equal(y, before)
    for lanes in (segments({"a": 5, "b": 1, "c": 16}), KINDS["mixed mode"][1], [], [Lane("b", 21, 22, -1.0)]):
        plan.refill(lanes)
        y.copy_(before)
        for launch in captured:
            launch.replay()
        for site, old, new in zip(group.sites, outputs, y.split([40, 16, 16], 1), strict=True):
            right = reference.add_delta(old, x, site, plan)
            assert ((new.double() - right).abs() <= bound(old, x, site, plan)).all()
        assert torch.equal(y, before) == (not lanes)


@pytest.mark.parametrize("check", (check_against_reference, check_group_against_reference))
def test_a_shrink_that_began_early_is_used_once_and_for_its_input_only(
    check: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group({"a": 4, "b": 17})
    group.pack("ab")
    plan = SegmentPlan(12, segments({"a": 5, "b": 7}), "tiled", room=3)
    x, outputs = make_input(12, group, torch.float32)
    both = 1 + (len(group.sites) if check is check_against_reference else 1)  # a shrink, and an expand per call

    def num_launched(begun: torch.Tensor | None) -> int:
        with capturing(monkeypatch) as captured:
            if begun is not None:
                begin_deltas(begun, group.sites[0], plan)
            check(group, plan, x, outputs)
        return len(captured)

    assert num_launched(x) == both  # the plan is not prepared yet, so nothing begins
    assert num_launched(x) == both
    assert num_launched(None) == both
    assert num_launched(x.flip(0)) == both + 1
    assert num_launched(x[:3]) == both  # not an input of the plan

    without_room = SegmentPlan(12, segments({"a": 5}), "tiled")
    check(group, without_room, x, outputs)
    with capturing(monkeypatch) as captured:
        begin_deltas(x, group.sites[0], without_room)
    assert not captured


@settings(max_examples=12, phases=(Phase.explicit, Phase.generate))
@given(batches(most_adapters=16), st.sampled_from(list(KERNELS)), st.sampled_from(list(RELATIVE)))
def test_any_batch_is_within_its_error(batch: Batch, strategy: str, dtype: torch.dtype) -> None:
    assert relative_error(batch, strategy, dtype) <= RELATIVE[dtype]


@pytest.mark.parametrize("o, i", ((70, 40), (128, 256), (64, 130)))
@pytest.mark.parametrize("rank", (1, 8, 65))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_merge(dtype: torch.dtype, rank: int, o: int, i: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    base, a, bt = (
        torch.randn(shape, generator=generator).to(dtype) * 0.1 for shape in ((2, o, i), (2, rank, i), (2, rank, o))
    )
    for out in (torch.empty_like(base), base.clone()):
        merge(out, base if out is not base else out, a, bt, -0.5)
        expected = reference.merge(base, a, bt, -0.5)
        close = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)
        assert (expected - base.double()).abs().max() > 0.01


def test_merge_of_slices() -> None:
    """Weights are rows of a joined matrix, factors are views of an arena: each tensor has strides of its own."""
    generator = torch.Generator().manual_seed(0)
    joined, arena_a, arena_bt = (torch.randn(3, 200, width, generator=generator) for width in (70, 70, 130))
    base, a, bt = joined[1:, 64:164, :40], arena_a[:2, 5:13, 16:56], arena_bt[1:, :8, :100]
    expected = joined.double()
    expected[1:, 64:164, :40] = reference.merge(base, a, bt, 0.5)
    merge(base, base, a, bt, 0.5)
    torch.testing.assert_close(joined.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("o, i", ((70, 40), (128, 256)))
@pytest.mark.parametrize("rank", (1, 8, 65))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_merge_into_eight_bits_rounds_the_exact_sum(dtype: torch.dtype, rank: int, o: int, i: int) -> None:
    """Weights are rows of a joined matrix, and values behind the factors and weights are not numbers."""
    generator = torch.Generator().manual_seed(rank)
    joined = torch.full((2, o + 16, i + 16), torch.nan).to(torch.float8_e4m3fn)
    base, out = (
        QuantizedWeight(values[:, 16:, :i], torch.empty(2, o, 1), dtype, Fp8()) for values in (joined, joined.clone())
    )
    for layer in range(2):
        base[layer].copy_(torch.randn(o, i, generator=generator) * 0.1)
    a, bt = (poisoned(torch.randn(2, rank, width, generator=generator).to(dtype) * 0.1) for width in (i, o))
    merge_rows(out.values, out.scales, base.values, base.scales, a, bt, Fp8().largest)
    exact = reference.merge(base.float(), a, bt)
    torch.testing.assert_close(out.scales.double(), exact.abs().amax(2, keepdim=True) / 448, rtol=1e-5, atol=0)
    unequal = (out.float().double() - base.rounded(exact.float()).double()).abs() > 1e-5
    assert unequal.double().mean() < 1e-3  # sums at a border between two values
    assert (exact - base.float().double()).abs().max() > 0.01


def poisoned(factors: torch.Tensor) -> torch.Tensor:
    """A view of a larger tensor, which has NaN around the factors [n, r, d]."""
    n, rank, width = factors.shape
    around = torch.full((n, rank + 3, width + 24), torch.nan, dtype=factors.dtype)
    around[:, :rank, :width] = factors
    return around[:, :rank, :width]


# -- factors read in place, without packed copies -----------------------------------------------------------------


def make_layers(num: int, dtype: torch.dtype = torch.float32) -> tuple[list[SiteGroup], FactorTable]:
    """Layers of two groups each, with adapters of different ranks and targets, in a factor table."""
    layers = []
    for layer in range(num):
        missing = [("a", 0)] if layer % 2 else [("b", 1)]
        layers.append(make_group({"a": 5, "b": 16, "c": 40}, d_in=48, missing=missing, dtype=dtype, seed=2 * layer))
        layers.append(make_group({"a": 5 + layer, "b": 16}, d_in=40, d_outs=(48,), dtype=dtype, seed=2 * layer + 1))
    table = FactorTable([group.sites for group in layers], dtype, torch.device("cpu"))
    for key in "abc":
        table.put(key)
    return layers, table


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("decode", torch.float32), ("mixed mode", torch.bfloat16), ("three at once", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("strategy", (None, "tiled m32 n128 k64 s0 p2"))
def test_factors_are_read_in_place_at_every_layer(strategy: str | None, kind: str, dtype: torch.dtype) -> None:
    num_tokens, lanes = KINDS[kind]
    layers, _ = make_layers(2, dtype)
    plan = SegmentPlan(num_tokens, lanes, strategy)
    for group in layers:
        check_group_against_reference(group, plan, *make_input(num_tokens, group, dtype))
    for group in layers:
        assert check_against_reference(group, plan, *make_input(num_tokens, group, dtype)) > 1
    assert len(plan.prepared) == 2, "layers of one shape share a prepared strategy"
    assert all(isinstance(prepared, InPlace) for prepared in plan.prepared.values())
    assert len(plan.shared) <= 2, "all classes share the tiles of one block size"


def test_adapters_that_move_change_slots_or_leave() -> None:
    layers, table = make_layers(2)
    plan = SegmentPlan(7, segments({"a": 3, "c": 4}))

    def check() -> None:
        for group in layers:
            assert check_against_reference(group, plan, *make_input(7, group, torch.float32)) > 1

    check()
    for group in layers:
        for site in group.sites:
            if "c" in site.factors:
                site.factors["c"] = Factors(*(factor.clone() for factor in site.factors["c"]))  # moved
    table.put("c")
    check()
    for group in layers:  # c leaves, another adapter takes its slot, and c returns in another slot
        for site in group.sites:
            site.factors["held"] = site.factors["b"] if "b" in site.factors else site.factors["a"]
    before = table.slots["c"]
    table.drop("c")
    table.put("held")
    assert table.slots["held"] == before
    table.put("c")
    assert table.slots["c"] != before
    check()


def test_a_table_grows_unless_it_has_room() -> None:
    layers, table = make_layers(1)
    plan = SegmentPlan(7, segments({"a": 3, "c": 4}))
    check_against_reference(layers[0], plan, *make_input(7, layers[0], torch.float32))
    generation = table.generation
    for index in range(100):
        for site in layers[0].sites:
            site.factors[f"more {index}"] = site.factors["c"]
        table.put(f"more {index}")
    assert table.generation == generation + 1 and len(set(table.slots.values())) == 103
    plan = SegmentPlan(7, segments({"a": 3, "more 99": 4}))
    for lanes in (plan, SegmentPlan(7, segments({"a": 3, "c": 4}))):
        assert check_against_reference(layers[0], lanes, *make_input(7, layers[0], torch.float32)) > 1
    layers = make_layers(1)[0]
    roomy = FactorTable([group.sites for group in layers], torch.float32, torch.device("cpu"), num_slots=100)
    for index in range(100):
        roomy.put(f"{index}")
    assert roomy.generation == 0 and len(set(roomy.slots.values())) == 100


def test_an_adapter_without_factors_adds_nothing() -> None:
    layers, table = make_layers(1)
    table.put("none")
    plan = SegmentPlan(7, segments({"none": 3, "a": 4}))
    assert check_against_reference(layers[0], plan, *make_input(7, layers[0], torch.float32)) > 1
    x, outputs = make_input(7, layers[0], torch.float32)
    y = torch.cat(outputs, 1)
    add_deltas(y, x, layers[0], SegmentPlan(7, segments({"none": 7})))
    assert torch.equal(y, torch.cat(outputs, 1))


def test_factors_that_kernels_cannot_read_use_products_per_lane() -> None:
    layers, table = make_layers(1)
    group = layers[0]
    a, bt = group.sites[0].factors["c"]
    odd = torch.zeros(len(a) * a.shape[1] + 1)[1:].view(a.shape).copy_(a)  # not at a multiple of 16 bytes
    group.sites[0].factors["c"] = Factors(odd, bt)
    table.put("c")
    assert "c" not in table.slots
    for lanes, in_place in ((segments({"a": 3, "c": 4}), False), (segments({"a": 3, "b": 4}), True)):
        plan = SegmentPlan(7, lanes)
        assert check_against_reference(group, plan, *make_input(7, group, torch.float32)) > 1
        assert all(isinstance(prepared, InPlace) == in_place for prepared in plan.prepared.values())


@pytest.mark.parametrize("loaded", ("before the capture", "after the capture"))
@pytest.mark.parametrize("strategy", (None, "tiled m32 n128 k64 s0 p2"))
def test_a_captured_graph_of_all_layers_uses_the_current_lanes_and_adapters(
    strategy: str | None, loaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, table = make_layers(2)
    plan = SegmentPlan(22, [], strategy, room=5)
    if loaded == "after the capture":
        plan = SegmentPlan(22, [], strategy, room=5, max_rank=64)
        for key in "abc":
            table.drop(key)
    inputs = [make_input(22, group, torch.float32) for group in layers]
    before = [torch.cat(outputs, 1) for _, outputs in inputs]
    after = [y.clone() for y in before]
    with capturing(monkeypatch) as captured:
        for group, (x, _), y in zip(layers, inputs, after, strict=True):
            add_deltas(y, x, group, plan)
    assert captured and all(map(torch.equal, after, before))
    for key in "abc":
        table.put(key)

    def replay(lanes: list[Lane]) -> None:
        plan.refill(lanes)
        for y, start in zip(after, before, strict=True):
            y.copy_(start)
        for launch in captured:
            launch.replay()
        for group, (x, outputs), y in zip(layers, inputs, after, strict=True):
            for site, old, new in zip(group.sites, outputs, y.split([s.d_out for s in group.sites], 1), strict=True):
                right = reference.add_delta(old, x, site, plan)
                assert ((new.double() - right).abs() <= bound(old, x, site, plan)).all()

    for lanes in (segments({"a": 5, "b": 1, "c": 16}), KINDS["mixed mode"][1], [], [Lane("b", 21, 22, -1.0)]):
        replay(lanes)
    for group in layers:
        for site in group.sites:
            site.factors["late"] = Factors(*(2 * factor for factor in next(iter(site.factors.values()))))
    table.put("late")
    table.drop("a")
    table.put("a")
    replay(segments({"late": 9, "a": 4, "c": 2}))

    for group in layers:
        for site in group.sites:
            site.factors["high"] = Factors(torch.ones(80, site.d_in), torch.ones(80, site.d_out))
    table.put("high")
    for lanes, words in (([Lane("high", 0, 2)], "rank 80"), ([Lane("gone", 0, 2)], "not packed or loaded: gone")):
        with pytest.raises(ValueError, match=words):
            plan.refill(lanes)
    replay(segments({"c": 2}))


# -- the launches that compile a search's kernels ---------------------------------------------------------------------


def test_every_sample_can_be_launched() -> None:
    samples = kernel_samples([Case(Shape(48, (40, 16)), rank, "float32", 1, 2, True) for rank in (8, 64)])
    assert search.launch(samples[::8], "cpu") == len(samples[::8]) >= 3
