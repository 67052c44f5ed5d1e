"""The Triton kernels in the interpreter, against the float64 reference."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from atmm import Lane, SegmentPlan, add_deltas, reference
from atmm.triton import kernels
from atmm.triton.handles import Handle, handle
from atmm.triton.lanes import SingleLaunch, Tiled, merge
from tests.atmm.cases import (
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

KINDS = {
    "decode": (3, segments({"a": 1, "b": 1, "c": 1})),
    "ragged": (40, segments({"c": 33, "a": 1, "b": 6})),
    "long": (75, segments({"a": 70, "b": 5})),
    "base tokens around": (12, segments({"b": 2, "c": 2}, start=5)),
    "mixed mode": (22, [Lane("a", 0, 18), Lane("b", 18, 20), Lane("c", 0, 20, -1.0), Lane("c", 20, 22, -1.0)]),
    "one adapter there and back": (6, [Lane("a", 0, 6), Lane("a", 2, 4, -1.0)]),
    "three at once": (6, [Lane("a", 0, 6), Lane("b", 1, 4), Lane("c", 2, 5, -1.0)]),
}


KERNELS = {
    "tiled": Tiled,
    "tiled m16 n64 k64 s2 p2": Tiled,
    "tiled m32 n128 k64 s0 p2": SingleLaunch,
}


@pytest.fixture(autouse=True)
def _interpreter_rounds_down(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter truncates float32 to bfloat16 instead of rounding, and hidden values are truncated once more.
    monkeypatch.setitem(ROUNDINGS, torch.bfloat16, 3)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", KERNELS)
def test_every_kind_of_batch(strategy: str, kind: str, dtype: torch.dtype) -> None:
    num_tokens, lanes = KINDS[kind]
    group = make_group({"a": 4, "b": 17, "c": 64}, dtype=dtype)
    group.pack("abc")
    plan = SegmentPlan(num_tokens, lanes, strategy)
    assert check_against_reference(group, plan, *make_input(num_tokens, group, dtype)) > 1
    assert all(isinstance(prepared, KERNELS[strategy]) for prepared in plan.prepared.values())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("d_outs", ((256, 128, 128), (40, 130, 16), (128,)), ids=str)
@pytest.mark.parametrize("kind", ("ragged", "base tokens around", "three at once"))
@pytest.mark.parametrize("strategy", KERNELS)
def test_a_whole_group_at_once(
    strategy: str, kind: str, d_outs: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, lanes = KINDS[kind]
    group = make_group({"a": 4, "b": 17, "c": 64}, d_outs=d_outs, missing=[("a", 0)], dtype=dtype)
    group.pack("abc")
    launches: Counter[str] = Counter()
    handle.cache_clear()
    for name in ("shrink", "expand", "single"):
        monkeypatch.setattr(kernels, name, Counted(name, getattr(kernels, name), launches))
    plan = SegmentPlan(num_tokens, lanes, strategy)
    check_group_against_reference(group, plan, *make_input(num_tokens, group, dtype))
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
def test_a_site_that_an_adapter_does_not_target(strategy: str) -> None:
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


@pytest.mark.parametrize("strategy", KERNELS)
def test_a_captured_graph_uses_the_current_lanes(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group({"a": 4, "b": 17, "c": 64}, missing=[("b", 1)])
    group.pack("abc")
    plan = SegmentPlan(22, [], strategy, room=5)
    x, outputs = make_input(22, group, torch.float32)
    before = torch.cat(outputs, 1)
    y = before.clone()
    captured: list[tuple[Handle, tuple]] = []
    launch = Handle.__call__

    def capturing_launch(self: Handle, *given: Any) -> None:
        captured.append((self, given))
        launch(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Handle, "__call__", capturing_launch)
        add_deltas(y, x, group, plan)
    assert captured and torch.equal(y, before)
    for lanes in (segments({"a": 5, "b": 1, "c": 16}), KINDS["mixed mode"][1], [], [Lane("b", 21, 22, -1.0)]):
        plan.refill(lanes)
        y.copy_(before)
        for handle_, given_ in captured:  # the same kernels, grids and addresses
            handle_(*given_)
        for site, old, new in zip(group.sites, outputs, y.split([40, 16, 16], 1), strict=True):
            right = reference.add_delta(old, x, site, plan)
            assert ((new.double() - right).abs() <= bound(old, x, site, plan)).all()
        assert torch.equal(y, before) == (not lanes)


@settings(max_examples=12, phases=(Phase.explicit, Phase.generate))
@given(batches(), st.sampled_from(list(KERNELS)), st.sampled_from(list(RELATIVE)))
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
