"""Switching of merged weights: exact with a shadow copy and where weights are rewritten, of bounded drift where deltas
are subtracted; whatever is merged, lost, or fails before.
"""

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
from vlora.lora.adapted_linear import LaneScope, adapt
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.base_weights import CopiedBaseWeights
from vlora.lora.host_adapter import HostAdapter
from vlora.lora.layout import HostFactors
from vlora.lora.merge import ModeSwitcher, ShadowSwitcher, merge_runs
from vlora.lora.merge_in_place import MAX_DRIFT, InPlaceSwitcher
from vlora.lora.weight_slabs import WeightSlabs
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.arena import PAGE_BYTES, Arena
from vlora.memory.host_to_device import Inline, make_transfer
from vlora.memory.page_allocator import PageAllocator

pytestmark = pytest.mark.slow

# Two layers have one shape. The last one has more values than the sample that is checked after each switch.
SHAPES = {
    "self_attn.q_proj": (96, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "mlp.down_proj": (160, 256),
}
LAYERS = 2
KINDS = ("rewriting", "subtracting", "shadow", "complete", "joined")
"""complete, joined: as on a GPU, where the shadow has W0 for layers without a delta, and q, k and v are one matrix."""
ROUNDING = {torch.bfloat16: 2e-4, torch.float32: 1e-6}  # a sum halfway between two values may round either way


class Box:
    """Slabs of random weights, a switcher over them, and adapters with deltas of `ratio` times their norm."""

    def __init__(
        self, kind: str, dtype: torch.dtype = torch.bfloat16, ratio: float = 0.1, ranks: Sequence[int] = (8, 64, 5, 16)
    ) -> None:
        self.generator = torch.Generator().manual_seed(1)
        scope = LaneScope()
        self.linears = {}
        for layer in range(LAYERS):
            for part, (d_out, d_in) in SHAPES.items():
                bias = part == "self_attn.q_proj"
                linear = nn.Linear(d_in, d_out, bias=bias, dtype=dtype).requires_grad_(False)
                linear.weight.copy_(self.random(d_out, d_in) * 0.02)
                name = f"model.language_model.layers.{layer}.{part}"
                self.linears[name] = adapt(linear, name, scope)
        self.before = {name: linear.weight.clone() for name, linear in self.linears.items()}
        self.biases = {name: linear.bias.clone() for name, linear in self.linears.items() if linear.bias is not None}
        self.slabs = WeightSlabs(self.linears, join=kind == "joined")
        arena = Arena(2**24 // PAGE_BYTES, torch.device("cpu"))
        cache = AdapterCache(PageAllocator(arena.num_pages, 1), arena.num_pages)
        transfer = make_transfer(torch.device("cpu"), Inline())
        self.pool = AdapterPool(arena, cache, transfer, self.linears, {}, self.slabs.order)
        self.kind = kind
        self.limit = MAX_DRIFT if kind == "subtracting" else ROUNDING[dtype]
        if kind in ("rewriting", "subtracting"):
            copied = CopiedBaseWeights(self.slabs)
            self.switcher: ModeSwitcher = InPlaceSwitcher(
                self.slabs, self.pool, copied, subtracting=kind == "subtracting"
            )
        else:
            self.switcher = ShadowSwitcher(self.slabs, self.pool, complete=kind != "shadow")
        self.adapters: dict[str, HostAdapter] = {}
        self.known: dict[tuple[str, str], torch.Tensor] = {}
        for number, rank in enumerate(ranks):
            # Every third adapter skips a layer of each block.
            names = [name for name in self.slabs.order if number % 3 or "k_proj" not in name]
            scale = (ratio * 0.02 / rank**0.5) ** 0.5
            factors = {
                name: HostFactors(
                    (self.random(rank, self.linears[name].in_features) * scale).to(dtype),
                    (self.random(rank, self.linears[name].out_features) * scale).to(dtype),
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

    def addresses(self) -> dict[str, int]:
        return {name: linear.weight.data_ptr() for name, linear in self.linears.items()}


@pytest.mark.parametrize(
    ("kind", "dtype", "ratio"),
    [
        ("subtracting", torch.bfloat16, 0.1),
        ("rewriting", torch.float32, 0.1),
        ("shadow", torch.bfloat16, 0.1),
        ("joined", torch.float32, 0.1),
        *(
            pytest.param(kind, dtype, ratio, marks=pytest.mark.exhaustive)
            for kind, dtype, ratio in (
                *(("rewriting", torch.bfloat16, ratio) for ratio in (0.01, 0.1, 1.0)),
                *(("subtracting", torch.bfloat16, ratio) for ratio in (0.01, 1.0)),
                *(("subtracting", torch.float32, 0.1), ("shadow", torch.float32, 0.1)),
                *((kind, torch.bfloat16, 0.1) for kind in ("complete", "joined")),
            )
        ),
    ],
)
def test_drift_over_a_thousand_switches_among_different_adapters(kind: str, dtype: torch.dtype, ratio: float) -> None:
    box = Box(kind, dtype, ratio, (8, 16, 64, 8, 32, 5, 8, 64) * 2)
    draw = random.Random(3)
    worst, returns = 0.0, 0
    for _ in range(1000):
        box.switcher.switch(draw.choice([*box.adapters, None]))
        worst = max(worst, box.drift())
        if box.switcher.merged_key is None and kind != "subtracting":
            assert box.is_original()
            returns += 1
    assert worst <= box.limit
    assert kind == "subtracting" or returns > 20
    box.switcher.switch(next(iter(box.adapters)))
    box.switcher.forget(next(iter(box.adapters)))
    assert box.switcher.merged_key is None and box.is_original()


@settings(max_examples=scaled(60))
@given(
    moves=st.lists(st.tuples(st.sampled_from(["switch", "forget", "fail"]), st.integers(0, 5)), max_size=30),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_any_sequence_of_switches_losses_and_failures(
    moves: list[tuple[str, int]], kind: str, dtype: torch.dtype
) -> None:
    box = Box(kind, dtype, ranks=(8, 64, 5, 16, 8))
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
        elif move == "fail" and key not in (None, before) and fail_at(box, 2 + number % 2, key):
            assert box.switcher.merged_key is None and box.is_original()
        assert box.drift() <= box.limit


def fail_at(box: Box, call: int, key: str | None) -> bool:
    """Switch to `key` with a merge that fails within its layers. Returns whether it has merged so many."""
    merge_for_real, calls = atmm.merge, 0

    def merge(out: torch.Tensor, *arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            out.fill_(torch.nan)
            raise RuntimeError("out of memory")
        merge_for_real(out, *arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atmm, "merge", merge)
        try:
            box.switcher.switch(key)
        except RuntimeError as error:
            assert str(error) == "out of memory"
    return calls >= call


# -- the shadow -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shadow", "complete", "joined"])
def test_merged_weights_have_fixed_addresses(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a captured graph holds for every adapter; on a CPU layers without a delta have W0 itself. Memory for
    merged weights is allocated at startup, so the first merge costs the same as later ones.
    """
    box = Box(kind)
    on_base, draw = box.addresses(), random.Random(3)
    monkeypatch.setattr(box.slabs, "allocate", lambda *_: pytest.fail("a merge allocates memory for weights"))
    merged_at: set[tuple[int, ...]] = set()
    for key in draw.choices([*box.adapters, None], k=30):
        box.switcher.switch(key)
        at = box.addresses()
        if key is None:
            assert at == on_base
        elif kind == "shadow":
            shared = {name for name in at if at[name] == on_base[name]}
            assert shared == at.keys() - box.adapters[key].shapes.keys()
        else:
            merged_at.add(tuple(at.values()))
            assert not set(at.values()).intersection(on_base.values())
        for linear in box.linears.values():
            if linear.joined is not None:
                first = linear.joined.weight.data_ptr()
                assert first <= linear.weight.data_ptr() < first + linear.joined.weight.nbytes
    assert len(merged_at) == (kind != "shadow")


def test_joined_layers_are_never_switched_apart() -> None:
    """On a GPU one product computes layers with the same input; their biases are one copy, too."""
    box = Box("joined")
    joined = {name: linear.joined for name, linear in box.linears.items() if linear.joined is not None}
    assert len(joined) == 3 * LAYERS and len({id(weights) for weights in joined.values()}) == LAYERS
    for name, bias in box.biases.items():
        linear, together = box.linears[name], joined[name]
        assert torch.equal(linear.bias, bias) and together.bias is not None
        first = together.bias.data_ptr()
        assert first <= linear.bias.data_ptr() < first + together.bias.nbytes, "one copy"
    with pytest.raises(AssertionError, match="one place"):
        ShadowSwitcher(box.slabs, box.pool)


def test_layers_of_one_shape_and_rank_merge_in_one_call() -> None:
    box = Box("shadow")
    (all_but_k, every) = (adapter.shapes for adapter in list(box.adapters.values())[:2])
    runs = merge_runs(box.slabs, every)
    assert len(runs) == len(box.slabs.base) < len(box.linears)
    assert sum(run.last - run.first for run in runs) == len(box.linears)
    assert sum(run.last - run.first for run in merge_runs(box.slabs, all_but_k)) == len(box.linears) - LAYERS


def test_a_complete_shadow_copies_only_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box("complete")
    without_k, whole, *_ = box.adapters
    copied: list[int] = []
    copy = torch.Tensor.copy_

    def recorded_copy(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        copied.append(len(own))
        return copy(own, other)

    monkeypatch.setattr(torch.Tensor, "copy_", recorded_copy)
    monkeypatch.setattr(atmm, "merge", lambda *_: None)
    for key, num_copied in ((without_k, 0), (whole, 0), (without_k, LAYERS), (None, LAYERS), (without_k, LAYERS)):
        box.switcher.switch(key)
        assert sum(copied) == num_copied, "the shadow starts with W0"


# -- in place ---------------------------------------------------------------------------------------------------------


def test_subtracting_without_rewriting_exceeds_the_drift_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box("subtracting", ranks=(8, 64, 16, 32) * 4)
    monkeypatch.setattr("vlora.lora.merge_in_place.SAMPLE_SHARE", math.inf)
    for key in (*box.adapters, None):
        box.switcher.switch(key)
    assert MAX_DRIFT < box.drift() < 5 * MAX_DRIFT


def test_a_failed_restore_is_completed_by_the_next_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box("subtracting", ranks=(8, 8))
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
    box = Box("subtracting", ratio=0.01, ranks=(8, 8))
    drowning = next(iter(box.adapters))
    for name in box.adapters[drowning].shapes:
        box.pool.factors(drowning, name).bt[:, 1] = size
    box.switcher.switch(drowning)
    assert not box.is_original()
    box.switcher.switch(None)
    assert box.drift() <= MAX_DRIFT
    assert all(torch.equal(box.slabs.entry(name)[1], weight[1]) for name, weight in box.before.items())
