"""Switching in place: drift is always bounded, and 0 for weights rewritten from the base weights."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import atmm
from tests.example_counts import scaled
from tests.lora.made_adapters import factors_of, host_adapter
from vlora.lora import HostAdapter, HostFactors
from vlora.lora.adapted_linear import LaneScope, adapt
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.base_weights import CopiedBaseWeights
from vlora.lora.merge_in_place import MAX_DRIFT, InPlaceSwitcher
from vlora.lora.weight_slabs import WeightSlabs
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.arena import PAGE_BYTES, Arena
from vlora.memory.host_to_device import Inline, make_transfer
from vlora.memory.page_allocator import PageAllocator

pytestmark = pytest.mark.slow

# The last shape has more values than the sample that is checked after each switch.
SHAPES = {"self_attn.q_proj": (96, 128), "self_attn.k_proj": (96, 128), "mlp.down_proj": (160, 256)}
LAYERS = 2


class Box:
    """Slabs of random weights, an in-place switcher over them, and adapters with deltas of `ratio` times their norm."""

    def __init__(self, dtype: torch.dtype, *, subtracting: bool, ratio: float, ranks: Sequence[int]) -> None:
        self.generator = torch.Generator().manual_seed(1)
        scope = LaneScope()
        linears = {}
        for layer in range(LAYERS):
            for kind, (d_out, d_in) in SHAPES.items():
                linear = nn.Linear(d_in, d_out, bias=False, dtype=dtype).requires_grad_(False)
                linear.weight.copy_(self.random(d_out, d_in) * 0.02)
                name = f"model.language_model.layers.{layer}.{kind}"
                linears[name] = adapt(linear, name, scope)
        self.before = {name: linear.weight.clone() for name, linear in linears.items()}
        self.slabs = WeightSlabs(linears)
        arena = Arena(2**24 // PAGE_BYTES, torch.device("cpu"))
        self.pool = AdapterPool(
            arena,
            AdapterCache(PageAllocator(arena.num_pages, 1), arena.num_pages),
            make_transfer(torch.device("cpu"), Inline()),
            linears,
            {},
            self.slabs.order,
        )
        self.base_weights = CopiedBaseWeights(self.slabs)
        self.switcher = InPlaceSwitcher(self.slabs, self.pool, self.base_weights, subtracting=subtracting)
        self.adapters: dict[str, HostAdapter] = {}
        self.known: dict[tuple[str, str], torch.Tensor] = {}
        for number, rank in enumerate(ranks):
            # Every third adapter skips one kind of layer.
            names = [name for name in self.slabs.order if number % 3 or "k_proj" not in name]
            scale = (ratio * 0.02 / rank**0.5) ** 0.5
            factors = {
                name: HostFactors(
                    (self.random(rank, linears[name].in_features) * scale).to(dtype),
                    (self.random(rank, linears[name].out_features) * scale).to(dtype),
                )
                for name in names
            }
            adapter = host_adapter(f"a{number}@1", factors)
            assert self.pool.load(adapter)
            self.adapters[adapter.key] = adapter

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def wanted(self, name: str) -> torch.Tensor:
        """The weights of a layer after an exact switch: W0, or W0 + delta rounded once."""
        weight, key = self.before[name], self.switcher.merged_key
        if key is None or name not in self.adapters[key].shapes:
            return weight
        if (key, name) not in self.known:
            a, bt = factors_of(self.adapters[key])[name]
            self.known[key, name] = (weight.double() + bt.double().t() @ a.double()).to(weight.dtype)
        return self.known[key, name]

    def drift(self) -> float:
        """The largest relative root mean square error of any layer against `wanted`."""
        return max(
            float((linear.weight.float() - self.wanted(name).float()).norm() / self.wanted(name).float().norm())
            for name, linear in self.slabs.linears.items()
        )

    def is_original(self) -> bool:
        return all(torch.equal(linear.weight, self.before[name]) for name, linear in self.slabs.linears.items())


ROUNDING = {torch.bfloat16: 2e-4, torch.float32: 1e-6}  # a sum halfway between two values may round either way


@pytest.mark.parametrize(
    ("dtype", "ratio", "subtracting"),
    [
        (torch.bfloat16, 0.1, True),
        (torch.float32, 0.1, False),
        *(
            pytest.param(dtype, ratio, subtracting, marks=pytest.mark.exhaustive)
            for dtype, ratio, subtracting in (
                (torch.bfloat16, 0.1, False),
                (torch.bfloat16, 0.01, True),
                (torch.bfloat16, 1.0, True),
                (torch.bfloat16, 0.01, False),
                (torch.bfloat16, 1.0, False),
                (torch.float32, 0.1, True),
            )
        ),
    ],
)
def test_drift_over_a_thousand_switches_among_different_adapters(
    dtype: torch.dtype, ratio: float, subtracting: bool
) -> None:
    box = Box(dtype, subtracting=subtracting, ratio=ratio, ranks=(8, 16, 64, 8, 32, 5, 8, 64) * 2)
    draw = random.Random(3)
    worst, returns = 0.0, 0
    for _ in range(1000):
        box.switcher.switch(draw.choice([*box.adapters, None]))
        worst = max(worst, box.drift())
        if box.switcher.merged_key is None and not subtracting:
            assert box.is_original()
            returns += 1
    assert worst <= (MAX_DRIFT if subtracting else ROUNDING[dtype])
    assert subtracting or returns > 20
    box.switcher.switch(next(iter(box.adapters)))
    box.switcher.forget(next(iter(box.adapters)))
    assert box.switcher.merged_key is None and box.is_original()


def test_subtracting_without_rewriting_exceeds_the_drift_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(torch.bfloat16, subtracting=True, ratio=0.1, ranks=(8, 64, 16, 32) * 4)
    monkeypatch.setattr("vlora.lora.merge_in_place.SAMPLE_SHARE", math.inf)
    for key in (*box.adapters, None):
        box.switcher.switch(key)
    assert MAX_DRIFT < box.drift() < 5 * MAX_DRIFT


@settings(max_examples=scaled(40))
@given(
    moves=st.lists(st.tuples(st.sampled_from(["switch", "forget", "fail"]), st.integers(0, 5)), max_size=30),
    subtracting=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_any_sequence_of_switches_losses_and_failures(
    moves: list[tuple[str, int]], subtracting: bool, dtype: torch.dtype
) -> None:
    box = Box(dtype, subtracting=subtracting, ratio=0.1, ranks=(8, 64, 5, 16, 8))
    keys: list[str | None] = [None, *box.adapters]
    for move, number in moves:
        key = keys[number]
        before = box.switcher.merged_key
        if move == "switch":
            assert box.switcher.switch(key) == (key != before)
            assert box.switcher.merged_key == key
        elif move == "forget" and key is not None:
            box.switcher.forget(key)
            assert box.switcher.merged_key == (None if before == key else before)
            assert before != key or box.is_original()
        elif move == "fail" and key not in (None, before):
            fail_after(box, 3, key)
            assert box.switcher.merged_key is None and box.is_original()
        assert box.drift() <= (MAX_DRIFT if subtracting else ROUNDING[dtype])


def fail_after(box: Box, num_calls: int, key: str | None) -> None:
    """Switch to `key` with a merge that fails after a few layers."""
    merge_for_real = atmm.merge
    calls = 0

    def merge(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == num_calls:
            raise RuntimeError("out of memory")
        merge_for_real(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atmm, "merge", merge)
        with pytest.raises(RuntimeError, match="out of memory"):
            box.switcher.switch(key)


def test_a_failed_restore_is_completed_by_the_next_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(torch.bfloat16, subtracting=True, ratio=0.1, ranks=(8, 8))
    first, second = box.adapters
    box.switcher.switch(first)
    monkeypatch.setattr(CopiedBaseWeights, "weight", lambda self, name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        box.switcher.forget(first)
    with pytest.raises(ZeroDivisionError):
        box.switcher.switch(None)
    monkeypatch.undo()
    assert box.switcher.switch(None), "half-written weights do not count as W0"
    assert box.is_original()
    box.switcher.switch(second)
    assert box.drift() <= ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("size", [1e3, 1e38])
def test_a_huge_delta_in_an_unsampled_row_does_not_damage_the_weights(
    monkeypatch: pytest.MonkeyPatch, size: float
) -> None:
    monkeypatch.setattr("vlora.lora.merge_in_place.SAMPLE_VALUES", 1)
    box = Box(torch.bfloat16, subtracting=True, ratio=0.01, ranks=(8, 8))
    drowning = next(iter(box.adapters))
    for name in box.adapters[drowning].shapes:
        box.pool.factors(drowning, name).bt[:, 1] = size
    box.switcher.switch(drowning)
    assert not box.is_original()
    box.switcher.switch(None)
    assert box.drift() <= MAX_DRIFT
    assert all(torch.equal(box.slabs.entry(name)[1], weight[1]) for name, weight in box.before.items())
