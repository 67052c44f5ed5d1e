"""Launches of the Triton kernels in the interpreter: graphs, early shrinks, factors in place, merges to eight bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from atmm import Factors, FactorTable, Lane, SegmentPlan, SiteGroup, add_deltas, begin_deltas, reference
from atmm.formats import Fp8
from atmm.quantized import QuantizedWeight
from atmm.triton.handles import Handle
from atmm.triton.lanes import InPlace, SingleLaunch, Tiled
from atmm.triton.merging import merge_rows
from atmm.triton.tiling import LEAST_SHARED
from atmm.tuning import search
from atmm.tuning.search import Case, Shape, kernel_samples
from tests.atmm.cases import (
    KINDS,
    STRATEGIES,
    bound,
    check_against_reference,
    check_group_against_reference,
    inside,
    make_group,
    make_input,
    segments,
)

SINGLE = "tiled m32 n128 k64 s0 p2"
PLANS: tuple[list[Lane], ...] = (
    segments({"a": 5, "b": 1, "c": 16}),
    KINDS["mixed mode"][1],
    [],
    [Lane("b", 21, 22, -1.0)],
)


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_captured_graph_uses_the_current_lanes(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is a single launch, or a shrink and an expand."""
    group = make_group({"a": 4, "b": 17, "c": 64}, missing=[("b", 1)])
    group.pack("abc")
    plan = SegmentPlan(22, [], strategy, room=5)
    inputs = [make_input(22, group, torch.float32)]
    with capturing(monkeypatch) as captured:
        after = [torch.cat(inputs[0][1], 1)]
        add_deltas(after[0], inputs[0][0], group, plan)
    assert len(captured) == (1 if strategy == SINGLE else 2)
    assert all(isinstance(each, SingleLaunch if strategy == SINGLE else Tiled) for each in plan.prepared.values())
    for lanes in PLANS:
        replay(captured, plan, lanes, [group], inputs, after)


def replay(
    captured: list[Captured],
    plan: SegmentPlan,
    lanes: list[Lane],
    layers: list[SiteGroup],
    inputs: list[tuple[torch.Tensor, list[torch.Tensor]]],
    after: list[torch.Tensor],
) -> None:
    """Replay the launches with other lanes, and check what they add to the outputs."""
    plan.refill(lanes)
    for y, (_, outputs) in zip(after, inputs, strict=True):
        y.copy_(torch.cat(outputs, 1))
    for launch in captured:
        launch.replay()
    for group, (x, outputs), y in zip(layers, inputs, after, strict=True):
        for site, old, new in zip(group.sites, outputs, y.split([s.d_out for s in group.sites], 1), strict=True):
            right = reference.add_delta(old, x, site, plan)
            assert ((new.double() - right).abs() <= bound(old, x, site, plan)).all()
        assert lanes or torch.equal(y, torch.cat(outputs, 1))


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
    factors = (torch.randn(2, rank, width, generator=generator).to(dtype) * 0.1 for width in (i, o))
    a, bt = (inside(each.view(2 * rank, -1), 16).unflatten(0, (2, rank)) for each in factors)
    merge_rows(out.values, out.scales, base.values, base.scales, a, bt, Fp8().largest)
    exact = reference.merge(base.float(), a, bt)
    torch.testing.assert_close(out.scales.double(), exact.abs().amax(2, keepdim=True) / 448, rtol=1e-5, atol=0)
    unequal = (out.float().double() - base.rounded(exact.float()).double()).abs() > 1e-5
    assert unequal.double().mean() < 1e-3  # sums at a border between two values
    assert (exact - base.float().double()).abs().max() > 0.01


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
@pytest.mark.parametrize("strategy", (None, SINGLE))
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
@pytest.mark.parametrize("strategy", (None, SINGLE))
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
    after = [torch.cat(outputs, 1) for _, outputs in inputs]
    with capturing(monkeypatch) as captured:
        for group, (x, _), y in zip(layers, inputs, after, strict=True):
            add_deltas(y, x, group, plan)
    assert captured
    for key in "abc":
        table.put(key)
    for lanes in PLANS:
        replay(captured, plan, lanes, layers, inputs, after)
    sites = [site for group in layers for site in group.sites]
    for site in sites:
        site.factors["late"] = Factors(*(2 * factor for factor in next(iter(site.factors.values()))))
        site.factors["high"] = Factors(torch.ones(80, site.d_in), torch.ones(80, site.d_out))
    table.put("late")
    table.drop("a")
    table.put("a")
    replay(captured, plan, segments({"late": 9, "a": 4, "c": 2}), layers, inputs, after)
    table.put("high")
    for lanes, words in (([Lane("high", 0, 2)], "rank 80"), ([Lane("gone", 0, 2)], "not packed or loaded: gone")):
        with pytest.raises(ValueError, match=words):
            plan.refill(lanes)
    replay(captured, plan, segments({"c": 2}), layers, inputs, after)


# -- the launches that compile a search's kernels ---------------------------------------------------------------------


def test_every_sample_can_be_launched() -> None:
    cases = [Case(Shape(48, (40, 16)), rank, "float32", 1, 2, True) for rank in (8, 64)]
    samples = kernel_samples(cases, LEAST_SHARED)
    assert search.launch(samples[::8], "cpu") == len(samples[::8]) >= 3
