"""The kernels of a GPU search: which ones it times, that all are compiled before, and how its candidates are called."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from atmm import reference
from atmm.batch_stats import BatchStats
from atmm.layers import SiteGroup
from atmm.places import PackedPlaces
from atmm.tuning import search
from atmm.tuning.search import (
    Case,
    KernelKey,
    KernelSample,
    Shape,
    cases,
    compile_kernels,
    kernel_samples,
    replayed_calls,
)

tiling = pytest.importorskip("atmm.triton.tiling")

SHAPES = (Shape(3584, (3584, 512, 512)), Shape(18944, (3584,)))
SMALL = (Shape(192, (96, 64)), Shape(100, (80,)), Shape(1024, (128,)))


@functools.cache
def group_of(case: Case) -> SiteGroup:
    return case.group("cpu")


def launched(case: Case, name: str) -> tuple[object, ...]:
    """The kernels that a tiling launches for a case, by their handles: equal kernels share one."""
    from atmm.triton.handles import Handle
    from atmm.triton.lanes import prepare

    group = group_of(case)
    assert group.packed is not None
    plan, layout = case.plan(), group.packed.layout
    strategy = prepare(plan, BatchStats(plan, layout), PackedPlaces(layout), tiling.Tiling.named(name))
    y, x = (torch.empty(case.num_tokens, width, dtype=layout.dtype) for width in (group.d_out, layout.d_in))
    handles: list[Handle] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handle, "__call__", lambda handle, *_: handles.append(handle))
        strategy.add_all(y, x, group)
    return tuple(handles)


def test_samples_cover_every_kernel_of_the_candidates_once() -> None:
    some = [case for case in cases(SMALL, ["bfloat16"]) if case.num_tokens in (1, 16, 256) and case.num_adapters <= 2]
    samples = kernel_samples(some)
    compiled = {
        launched(Case(Shape(each.d_in, each.d_outs), each.rank, each.dtype, 1, 2, True), each.tiling)
        for each in samples
    }
    assert len({each.key() for each in samples}) == len(samples)
    needed = set()
    for case in some:
        lengths = [lane.stop - lane.start for lane in case.plan().lanes]
        programs = tiling.shrink_programs(lengths, len(case.shape.d_outs), case.rank)
        for each in tiling.finalists(2, case.shape.d_in, max(lengths), case.num_tokens, programs):
            needed.add(launched(case, each.name))
    assert needed <= compiled
    assert len(compiled) <= len(samples) <= 1.1 * len(compiled)


def test_samples_of_one_kernel_are_recognized() -> None:
    def key(**changed: Any) -> KernelKey:
        sample = KernelSample(3584, (3584, 512, 512), 16, "bfloat16", "tiled m16 n128 k128 s4 p3")
        return sample._replace(**changed).key()

    assert key(rank=8) == key() == key(d_in=18944, d_outs=(3584, 3584, 3584))
    others = [
        key(rank=64),
        key(dtype="float32"),
        key(d_in=3600),
        key(d_outs=(3584,)),
        key(d_outs=(3584, 512, 100)),
        key(tiling="tiled m16 n64 k64 s1 p2"),
    ]
    assert len({key(), *others}) == 1 + len(others)


@pytest.mark.parametrize(("num_tokens", "num_lanes", "rank"), itertools.product((1, 8, 64, 2048), (1, 8), (16, 64)))
def test_finalists_are_the_sensible_tilings_around_the_default(num_tokens: int, num_lanes: int, rank: int) -> None:
    if num_lanes > num_tokens:
        pytest.skip("each lane has a token")
    longest = num_tokens // num_lanes
    programs = tiling.shrink_programs([longest] * num_lanes, 3, rank)
    found = tiling.finalists(2, 3584, longest, num_tokens, programs)
    sensible = set(tiling.sensible(2, 3584, longest, num_tokens))
    assert len(found) == len(set(found)) == min(24, len(sensible)) and set(found) <= sensible
    default = tiling.usual(2, 3584, longest, programs)
    if default in sensible:
        assert found[0] == default
    assert any(not each.split_k for each in found) == any(not each.split_k for each in sensible)


class Immediate:
    """As Replays, without a graph: calls, and counts what is launched before each call."""

    def __init__(self, call: Callable[[], object], before: Callable[[], object], parts: int) -> None:
        self.call, self.before, self.parts = call, before, parts

    def __call__(self) -> float:
        self.before()
        self.call()
        return 1.0 / self.parts


@pytest.mark.parametrize("strategy", ["loop", "batched", "gathered"])
def test_a_replayed_call_adds_the_deltas_of_every_copy(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "Replays", Immediate)
    monkeypatch.setattr(search, "MOST_COPIES", 3)
    case = Case(Shape(48, (40, 16)), 8, "float32", 3, 12, True)
    group = case.group("cpu")
    drawn: list[torch.Tensor] = []
    plain = Case.input

    def recorded(self: Case, device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x, outputs = plain(self, device)
        drawn.append(x)
        return x, outputs

    monkeypatch.setattr(Case, "input", recorded)
    (call,) = replayed_calls(case, group, [strategy], "cpu").values()
    assert isinstance(call, Immediate) and call.parts == 3
    with torch.inference_mode():
        assert call() == pytest.approx(1 / 3)
    _, plan, x, y = call.call.args  # type: ignore[attr-defined]
    assert x is drawn[0] and y.shape == (12, 56)
    exact = [reference.add_delta(torch.zeros(12, site.d_out), x, site, plan) for site in group.sites]
    torch.testing.assert_close(y.double(), 3 * torch.cat(exact, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_process_that_cannot_compile_is_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    sample = KernelSample(64, (64,), 16, "bfloat16", "tiled m16 n64 k64 s1 p2")
    with caplog.at_level(logging.WARNING):
        compile_kernels([sample], "cuda")
    assert "kernels are compiled during the search" in caplog.text


def test_no_samples_start_no_processes() -> None:
    compile_kernels([], "cuda")
