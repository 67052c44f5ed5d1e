"""The cost of merging another adapter into the weights, against PEFT's `merge_adapter` and against one copy of the
weights; with a shadow copy, and in place.

The floor is bytes: out of place, merging reads W0 once and writes the shadow once, as one copy does. In place,
rewriting does the same from the memory-mapped base weights, and subtracting reads and writes the weights twice.
"""

from __future__ import annotations

import gc
import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

import atmm
from atmm.quantized import Allocate
from vlora.bench.dummy import half_billion_config, language_shapes, random_peft, write_adapter
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.timing import interleaved, median_ms, median_ratio
from vlora.lora import AdapterRegistry
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.base_weights import CopiedBaseWeights
from vlora.lora.merge import merge_runs
from vlora.lora.merge_in_place import MAX_DRIFT, InPlaceSwitcher
from vlora.lora.merge_shadow import ShadowSwitcher
from vlora.lora.weight_slabs import WeightSlabs
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.arena import PAGE_BYTES, Arena
from vlora.memory.host_to_device import Inline, make_transfer
from vlora.memory.huge_pages import empty
from vlora.memory.page_allocator import PageAllocator
from vlora.models.hf_model import HFModel
from vlora.models.loading import dummy_model

_CPU = torch.device("cpu")
_MIB = 2**20
_SWITCHES = 1000
_LEAST_SPEEDUP = 3.5
_DRIFT_RANKS = (8, 16, 32, 64)


def measure(quick: bool) -> Measured:
    """Measure merge, restore, both in place, PEFT's merge and one copy, for a 0.5 B-parameter model in bfloat16, one
    thread; and the drift of the weights in place, for a narrow layer.

    The floor is one copy of the weights. PEFT's merge takes 8 of them on the processors so far, a merge of rank 8 here
    0.95 (with AMX) to 1.6 (without), one of rank 64, which is bound by arithmetic, 2.5 to 4.6.
    """
    torch.set_num_threads(1)
    rounds = 7 if quick else 9
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for rank, most_copies in ((8, 1.75), (64, 5.0)):
        calls, shadow_mib, in_place_mib = _calls(rank)
        seconds = interleaved(calls, rounds, warmup=1)
        speedup = median_ratio(seconds["PEFT merge"], seconds["merge"])
        copies = median_ratio(seconds["merge"], seconds["copy"])
        rows.append(
            {
                "rank": rank,
                **{f"{name} ms": median_ms(seconds[name]) for name in ("merge", "back", "copy")},
                "merge / copy": copies,
                **{f"{name} ms": median_ms(seconds[name]) for name in _IN_PLACE},
                "shadow MiB": shadow_mib,
                "in place MiB": in_place_mib,
                "PEFT merge ms": median_ms(seconds["PEFT merge"]),
                "PEFT unmerge ms": median_ms(seconds["PEFT unmerge"]),
                "PEFT / ours": speedup,
            }
        )
        goals.append(Goal(f"PEFT merge_adapter / merge, rank {rank}", speedup, _LEAST_SPEEDUP, False))
        goals.append(Goal(f"merge / one copy of the weights, rank {rank}", copies, most_copies, True))
        goals.append(Goal(f"going back to W0, rank {rank}, ms", median_ms(seconds["back"]), 1.0, True))
    num_switches = _SWITCHES // 10 if quick else _SWITCHES
    drift = drift_in_place(num_switches, _CPU)
    label = f"drift in place, in 1/1000 of the weights, at any of {num_switches} switches"
    goals.append(Goal(f"{label}, subtracting", drift.subtracting * 1e3, MAX_DRIFT * 1e3, True))
    goals.append(Goal(f"{label}, rewriting", drift.rewriting * 1e3, 0.0, True))
    goals.append(Goal("drift after a restore", drift.restored * 1e3, 0.0, True))
    return Measured(rows, {"drift": drift._asdict()}, goals)


BENCH = Bench(name="merge", measure=measure)


def _small_config(**text: int) -> Any:
    """The 0.5 B-parameter model, or a part of it."""
    config: Any = half_billion_config(vision="none")
    for name, value in text.items():
        setattr(config.text_config, name, value)
    return config


class MergeableModel:
    """Slabs and an adapter pool of a model with random weights in bfloat16, or of a given one.

    Args:
        config: The model's configuration.
        allocate: Makes the slabs.
        model: A loaded model, instead of random weights.
    """

    def __init__(
        self,
        config: Any,
        device: torch.device,
        arena_bytes: int = 2**30,
        allocate: Allocate = empty,
        model: Any | None = None,
    ) -> None:
        self.hf_model = HFModel(dummy_model(config, "bfloat16", device, seed=0) if model is None else model)
        self.shapes = language_shapes(self.hf_model.model)
        self.slabs = WeightSlabs(self.hf_model.language_linears, join=device.type == "cuda", allocate=allocate)
        arena = Arena(arena_bytes // PAGE_BYTES, device)
        adapter_cache = AdapterCache(PageAllocator(arena.num_pages, 1), arena.num_pages)
        self.pool = AdapterPool(
            arena,
            adapter_cache,
            make_transfer(device, Inline()),
            self.hf_model.language_linears,
            self.hf_model.vision_linears,
            self.slabs.order,
        )

    def load(self, ranks: Sequence[int]) -> list[str]:
        """Load random adapters."""
        with tempfile.TemporaryDirectory() as folder:
            return [
                self.load_folder(
                    write_adapter(
                        Path(folder) / f"a{number}", self.shapes, rank, seed=number, dtype=self.hf_model.dtype
                    )
                )
                for number, rank in enumerate(ranks)
            ]

    def load_folder(self, path: str) -> str:
        """Load an adapter from its folder."""
        registry = AdapterRegistry(self.pool.sites, self.hf_model.dtype, self.hf_model.hidden_size)
        adapter = registry.read_folder(Path(path).name, path).adapter
        assert adapter is not None and self.pool.load(adapter)
        if adapter.key in self.pool.loading:
            self.pool.finish_load(adapter.key)
        return adapter.key


_IN_PLACE = ("rewrite", "rewrite back", "subtract", "subtract back")


def _calls(rank: int) -> tuple[dict[str, Callable[[], object]], float, float]:
    """The timed calls in execution order: each round merges the other one of two adapters and restores W0. Also the
    memory of a first merge in MiB: with a shadow copy, and in place.
    """
    model = MergeableModel(_small_config(), _CPU)
    slabs = model.slabs
    keys = model.load((rank, rank))
    shadow, base_weights = ShadowSwitcher(slabs, model.pool), CopiedBaseWeights(slabs)
    rewriting, subtracting = (
        InPlaceSwitcher(slabs, model.pool, base_weights, subtracting=subtracting) for subtracting in (False, True)
    )
    in_place_mib = _taken_mib(lambda: rewriting.switch(keys[0]))
    rewriting.switch(None)
    shadow_mib = _taken_mib(lambda: shadow.switch(keys[0]))
    shadow.switch(None)
    copies = [torch.empty_like(slab) for slab in slabs.joined]
    peft = random_peft(dummy_model(half_billion_config(vision="none"), "bfloat16", _CPU, seed=0), rank)

    def copy() -> None:
        for target, slab in zip(copies, slabs.joined, strict=True):
            target.copy_(slab)

    turns = itertools.cycle(keys)
    calls: dict[str, Callable[[], object]] = {
        "merge": lambda: shadow.switch(next(turns)),
        "back": lambda: shadow.switch(None),
        "rewrite": lambda: rewriting.switch(keys[0]),
        "rewrite back": lambda: rewriting.switch(None),
        "subtract": lambda: subtracting.switch(keys[1]),
        "subtract back": lambda: subtracting.switch(None),
        "copy": copy,
        "PEFT merge": peft.merge_adapter,
        "PEFT unmerge": peft.unmerge_adapter,
    }
    return {name: torch.no_grad()(call) for name, call in calls.items()}, shadow_mib, in_place_mib


def _taken_mib(call: Callable[[], object]) -> float:
    """Private memory (not file-backed) that a call adds to the process."""
    gc.collect()
    process = psutil.Process()
    before = process.memory_info()
    with torch.no_grad():
        call()
    after = process.memory_info()
    return ((after.rss - after.shared) - (before.rss - before.shared)) / _MIB


class Drift(NamedTuple):
    """The worst layer's relative root mean square drift at any time, by method; after a restore; and the number of
    layers that subtraction had to rewrite, of the number it changed.
    """

    subtracting: float
    rewriting: float
    restored: float
    layers_rewritten: int
    layers_switched: int


def drift_in_place(num_switches: int, device: torch.device) -> Drift:
    """Drift over random switches among W0 and 32 adapters of four ranks, with deltas of a tenth of the weights."""
    model = MergeableModel(_small_config(num_hidden_layers=1, intermediate_size=896, vocab_size=512), device)
    keys = model.load(_DRIFT_RANKS * 8)
    slabs = model.slabs
    base = [slab.clone() for slab in slabs.base]
    base_weights = _CountingBaseWeights(CopiedBaseWeights(slabs))
    worst: dict[bool, float] = {}
    restored = 0.0
    rewritten = switched = 0
    with torch.no_grad():
        for subtracting in (False, True):
            switcher = InPlaceSwitcher(slabs, model.pool, base_weights, subtracting=subtracting)
            draw = random.Random(0)
            worst[subtracting], base_weights.count = 0.0, 0
            for _ in range(num_switches):
                switched += subtracting * len(slabs.slots) * switcher.switch(draw.choice([*keys, None]))
                worst[subtracting] = max(worst[subtracting], _distance(model, base, switcher.merged_key))
            rewritten = base_weights.count
            switcher.switch(keys[0])
            switcher.forget(keys[0])
            restored = max(restored, _distance(model, base, None))
    return Drift(worst[True], worst[False], restored, rewritten, switched)


class _CountingBaseWeights:
    """Base weights that count the layers requested."""

    def __init__(self, base_weights: CopiedBaseWeights) -> None:
        self._base_weights = base_weights
        self.count = 0

    def weight(self, name: str) -> torch.Tensor:
        self.count += 1
        return self._base_weights.weight(name)


def _distance(model: MergeableModel, base: Sequence[torch.Tensor], key: str | None) -> float:
    """The worst layer's |weights - wanted| / |wanted|, with wanted = W0, or W0 + delta rounded once."""
    wanted = base
    if key is not None:
        wanted = [slab.clone() for slab in base]
        for run in merge_runs(model.slabs, model.pool.shapes(key)):
            rows = wanted[run.slab][run.first : run.last]
            atmm.merge(rows, rows, *model.pool.stacked(key, run.names))
    worst = 0.0
    for slab, right in zip(model.slabs.base, wanted, strict=True):
        error = (slab.float() - right.float()).flatten(1).norm(dim=1)
        worst = max(worst, float((error / right.float().flatten(1).norm(dim=1)).max()))
    return worst
