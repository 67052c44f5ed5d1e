"""Sites of a group share one shrink, and the shared result is never stale."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from atmm import Lane, SegmentPlan, SiteGroup, add_delta, reference
from atmm.strategies import registry
from tests.atmm.cases import make_group, make_input, segments

SHARING = ("stacked", "gathered")


@pytest.fixture
def shrinks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of the packed A of every shrink."""
    shapes: list[tuple[int, ...]] = []
    linear: Callable[..., Tensor] = torch.nn.functional.linear
    mm: Callable[..., Tensor] = torch.mm

    def counting_linear(x: Tensor, weight: Tensor) -> Tensor:
        shapes.append(tuple(weight.shape))
        return linear(x, weight)

    def counting_mm(a: Tensor, columns: Tensor) -> Tensor:
        shapes.append(tuple(a.shape))
        return mm(a, columns)

    monkeypatch.setattr(registry.F, "linear", counting_linear)
    monkeypatch.setattr(registry.torch, "mm", counting_mm)
    return shapes


def run(group: SiteGroup, index: int, x: Tensor, plan: SegmentPlan) -> None:
    """Add the deltas of one site to zeros, and compare with the reference."""
    site = group.sites[index]
    y = torch.zeros(x.shape[0], site.d_out, dtype=x.dtype)
    add_delta(y, x, site, plan)
    expected = reference.add_delta(torch.zeros_like(y), x, site, plan)
    assert torch.allclose(y.double(), expected, atol=1e-4)
    assert expected.abs().max() > 0.1


def packed_group(**options: object) -> SiteGroup:
    group = make_group({"a": 4, "b": 8}, **options)  # type: ignore[arg-type]
    group.pack("ab")
    return group


@pytest.mark.parametrize("strategy", SHARING)
@pytest.mark.parametrize("inference", (True, False))
def test_one_shrink_serves_a_group_once_per_layer(shrinks: list, strategy: str, inference: bool) -> None:
    plan = SegmentPlan(5, segments({"a": 3, "b": 2}), strategy)
    with torch.inference_mode(inference):
        for layer in range(3):
            group = packed_group(seed=layer)
            x, _ = make_input(5, group, torch.float32)
            for index in range(3):
                run(group, index, x[None][0], plan)  # a new view each time, as modules create them
    assert shrinks == [(36, 48)] * 3


@pytest.mark.parametrize("strategy", SHARING)
def test_sites_may_be_called_in_any_order_or_not_at_all(strategy: str) -> None:
    plan = SegmentPlan(5, segments({"a": 3, "b": 2}), strategy)
    group = packed_group()
    for order in ((2, 0, 1), (1,), (2, 1), (0, 0, 0), (0, 1, 2)):
        x = torch.randn(5, 48)
        for index in order:
            run(group, index, x, plan)


@pytest.mark.parametrize("strategy", SHARING)
@pytest.mark.parametrize("inference", (True, False))
def test_another_input_is_recomputed(strategy: str, inference: bool) -> None:
    plan = SegmentPlan(5, segments({"a": 3, "b": 2}), strategy)
    group = packed_group()
    with torch.inference_mode(inference):
        for _ in range(20):  # freed memory is reused: the address alone must not decide
            run(group, 0, torch.randn(5, 48), plan)
            run(group, 1, torch.randn(5, 48), plan)
            run(group, 2, torch.randn(5, 48), plan)


@pytest.mark.parametrize("strategy", SHARING)
def test_another_view_of_the_same_memory_is_recomputed(strategy: str) -> None:
    plan = SegmentPlan(48, [Lane("a", 0, 48)], strategy)
    group = packed_group()
    x = torch.randn(48, 48)
    run(group, 0, x, plan)
    run(group, 1, x.t(), plan)
    run(group, 2, x, plan)


@pytest.mark.parametrize("strategy", SHARING)
def test_an_input_written_in_between_is_recomputed(strategy: str) -> None:
    plan = SegmentPlan(5, segments({"a": 3, "b": 2}), strategy)
    group = packed_group()
    x = torch.randn(5, 48)
    run(group, 0, x, plan)
    x.mul_(-2)
    run(group, 1, x, plan)


@pytest.mark.parametrize("strategy", SHARING)
@pytest.mark.parametrize("order", ("ab", "ba"))
def test_a_group_packed_again_in_between_is_used(strategy: str, order: str) -> None:
    plan = SegmentPlan(5, segments({"a": 3, "b": 2}), strategy)
    group, other = packed_group(), packed_group(seed=1)
    x = torch.randn(5, 48)
    run(group, 0, x, plan)
    for site, source in zip(group.sites, other.sites, strict=True):
        site.factors = dict(source.factors)
    group.pack(order)
    run(group, 1, x, plan)


@pytest.mark.parametrize("strategy", SHARING)
def test_groups_with_one_input_do_not_share_a_shrink(strategy: str) -> None:
    plan = SegmentPlan(5, segments({"a": 3, "b": 2}), strategy)
    groups = [packed_group(seed=seed) for seed in (0, 1)]
    x = torch.randn(5, 48)
    for index in range(3):
        for group in groups:
            run(group, index, x, plan)


@pytest.mark.parametrize("strategy", SHARING)
def test_the_input_is_released_after_the_last_site(strategy: str) -> None:
    plan = SegmentPlan(5, segments({"a": 3, "b": 2}), strategy)
    group = packed_group()
    x, outputs = make_input(5, group, torch.float32)
    held = weakref.ref(x)
    for y, site in zip(outputs, group.sites, strict=True):
        add_delta(y, x, site, plan)
    del x
    assert held() is None
