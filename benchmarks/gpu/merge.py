"""Switching a 7B model's weights with a shadow copy, in bfloat16 and in eight-bit floats: time against a copy of the
weights and, in bfloat16, against torch's `baddbmm`; the way back; and the drift of weights that are switched in place.
"""

from __future__ import annotations

import functools
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import atmm
from atmm.formats import FP8_CAPABILITY, Fp8
from atmm.quantized import Allocate, quantized_empty
from vlora.bench.dummy import half_billion_config, language_shapes, write_adapter
from vlora.bench.gpu import models
from vlora.bench.gpu.context import Context, device_seconds, elapsed, memory_speed, repeats
from vlora.bench.report import Goal
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.base_weights import CopiedBaseWeights
from vlora.lora.merge import ShadowSwitcher, merge_runs
from vlora.lora.merge_in_place import MAX_DRIFT, InPlaceSwitcher
from vlora.lora.registry import AdapterRegistry
from vlora.lora.weight_slabs import WeightSlabs
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.arena import PAGE_BYTES, Arena, empty
from vlora.memory.host_to_device import Inline, make_transfer
from vlora.memory.page_allocator import PageAllocator
from vlora.models.hf_model import HFModel
from vlora.models.loading import dummy_model


class MergeableModel:
    """Slabs and an adapter pool of a model in bfloat16.

    Args:
        config: The model's configuration.
        allocate: Makes the slabs.
    """

    def __init__(self, config: Any, device: torch.device, arena_bytes: int = 2**30, allocate: Allocate = empty) -> None:
        self.hf_model = HFModel(dummy_model(config, "bfloat16", device, seed=0))
        self.slabs = WeightSlabs(self.hf_model.language_linears, join=device.type == "cuda", allocate=allocate)
        arena = Arena(arena_bytes // PAGE_BYTES, device)
        self.pool = AdapterPool(
            arena,
            AdapterCache(PageAllocator(arena.num_pages, 1), arena.num_pages),
            make_transfer(device, Inline()),
            self.hf_model.language_linears,
            self.hf_model.vision_linears,
            self.slabs.order,
        )

    def load(self, ranks: Sequence[int]) -> list[str]:
        """Load random adapters. Returns their keys."""
        shapes, dtype = language_shapes(self.hf_model.model), self.hf_model.dtype
        with tempfile.TemporaryDirectory() as folder:
            return [
                self._load(write_adapter(Path(folder) / f"a{number}", shapes, rank, seed=number, dtype=dtype))
                for number, rank in enumerate(ranks)
            ]

    def _load(self, path: str) -> str:
        registry = AdapterRegistry(self.pool.sites, self.hf_model.dtype, self.hf_model.hidden_size)
        adapter = registry.read_folder(Path(path).name, path).adapter
        assert adapter is not None and self.pool.load(adapter)
        if adapter.key in self.pool.loading:
            self.pool.finish_load(adapter.key)
        return adapter.key


_RANKS = (16, 64)
ARENA_BYTES, _SMALL_ARENA_BYTES = 2 * 2**30, 2**27
SWITCHES, _SMALL_SWITCHES = 300, 5
_DRIFT_RANKS = (8, 16, 32, 64)


def run(context: Context) -> dict[str, Any]:
    """Every rank on one model, the lowest on one in eight-bit floats, then the drift on a narrow layer."""
    bytes_per_s = memory_speed(context)
    arena_bytes = ARENA_BYTES if context.on_gpu else _SMALL_ARENA_BYTES
    model = MergeableModel(models.config_of(context), context.device, arena_bytes)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        switcher = _switcher(context, model)
        keys = model.load([rank for rank in _RANKS for _ in range(2)])
        for place, rank in enumerate(_RANKS):
            row = _switches(context, switcher, keys[2 * place : 2 * place + 2])
            row["baddbmm ms"] = 1e3 * device_seconds(context, _baddbmm(model, keys[2 * place]))
            rows.append({"rank": rank, "format": "bfloat16", **_against_bytes(row, model, bytes_per_s)})
            context.keep({"rows": rows, "bytes_per_s": bytes_per_s})
        weight_bytes = model.slabs.num_bytes
        on_cuda = context.device.type == "cuda"
        if not on_cuda or torch.cuda.get_device_capability(context.device) >= FP8_CAPABILITY:
            del model, switcher  # its memory is needed
            eight_bits = quantized_empty(Fp8(), context.device, empty)
            model = MergeableModel(models.config_of(context), context.device, arena_bytes, eight_bits)
            switcher = _switcher(context, model, eight_bits)
            row = _switches(context, switcher, model.load([_RANKS[0]] * 2))
            rows.append({"rank": _RANKS[0], "format": "fp8", **_against_bytes(row, model, bytes_per_s)})
    drift = drift_in_place(SWITCHES if context.on_gpu else _SMALL_SWITCHES, context.device)
    return {
        "summary": "; ".join(
            f"r{row['rank']} {row['format']} {row['merge ms']:.2f} ms, {row['merge / bytes']:.2f} x bytes"
            for row in rows
        ),
        "rows": rows,
        "goals": goals_of(rows if context.on_gpu else [], drift),
        "drift": drift._asdict(),
        "weight_bytes": weight_bytes,
        "bytes_per_s": bytes_per_s,
    }


def goals_of(rows: Sequence[Mapping[str, Any]], drift: Drift) -> list[Goal]:
    """rows: of a 7B model on a GPU, where times have goals."""
    goals = []
    if rows:
        first = rows[0]
        goals = [
            Goal(f"merge / bytes, rank {first['rank']}", first["merge / bytes"], 1.25, True),
            Goal("back to W0, ms", max(row["back ms"] for row in rows), 0.1, True),
            Goal("first merge / later ones, rank 16", first["first ms"] / first["merge ms"], 1.5, True),
        ]
    goals.append(Goal("drift in place, subtracting, in 1/1000", 1e3 * drift.subtracting, 1e3 * MAX_DRIFT, True))
    return [*goals, Goal("drift after a restore", drift.restored, 0.0, True)]


def _switcher(context: Context, model: MergeableModel, eight_bits: Allocate | None = None) -> ShadowSwitcher:
    """The model's switcher, with kernels that are compiled before the first switch, as by an engine.

    eight_bits: makes the slabs if they are quantized.
    """
    shapes, dtype = model.slabs.shapes, model.hf_model.dtype
    if context.device.type == "cuda" and eight_bits is None:
        atmm.compile_merges(shapes, dtype, context.device)
    elif eight_bits is not None:
        atmm.compile_quantized_merges(shapes, eight_bits, dtype, context.device)
    return ShadowSwitcher(model.slabs, model.pool, complete=context.on_gpu)


def _switches(context: Context, switcher: ShadowSwitcher, keys: Sequence[str]) -> dict[str, float]:
    """Merge two adapters by turns. Times include the device."""
    first = elapsed(lambda: switcher.switch(keys[1]), context)
    merges: list[float] = []
    backs: list[float] = []
    again: list[float] = []
    for turn in range(repeats(context)):
        before, following = keys[1 - turn % 2], keys[turn % 2]
        backs.append(elapsed(lambda: switcher.switch(None), context))
        again.append(elapsed(functools.partial(switcher.switch, before), context))
        merges.append(elapsed(functools.partial(switcher.switch, following), context))
    switcher.switch(None)
    return {
        "first ms": 1e3 * first,
        "merge ms": 1e3 * statistics.median(merges),
        "back ms": 1e3 * statistics.median(backs),
        "merge of the same ms": 1e3 * statistics.median(again),
    }


def _against_bytes(row: dict[str, float], model: MergeableModel, bytes_per_s: float) -> dict[str, float]:
    bytes_ms = 1e3 * 2 * model.slabs.num_bytes / bytes_per_s
    return {**row, "bytes ms": bytes_ms, "merge / bytes": row["merge ms"] / bytes_ms}


def _baddbmm(model: MergeableModel, key: str) -> Callable[[], None]:
    """Torch's batched product over the same runs of layers, into copies of the weights."""
    copies = [torch.empty_like(slab) for slab in model.slabs.base]
    runs = [
        (copies[run.slab][run.first : run.last], model.slabs.base[run.slab][run.first : run.last], *factors)
        for run in merge_runs(model.slabs, model.pool.shapes(key))
        if (factors := model.pool.stacked(key, run.names))
    ]

    def call() -> None:
        for out, base, a, bt in runs:
            torch.baddbmm(base, bt.transpose(1, 2), a, out=out)

    return call


class Drift(NamedTuple):
    """The worst layer's relative root mean square drift at any time, by method, and after a restore."""

    subtracting: float
    rewriting: float
    restored: float


def drift_in_place(num_switches: int, device: torch.device) -> Drift:
    """Drift over random switches among W0 and 32 adapters of four ranks, with deltas of a tenth of the weights."""
    config: Any = half_billion_config(1, vision="none")
    config.text_config.intermediate_size, config.text_config.vocab_size = 896, 512
    model = MergeableModel(config, device)
    keys = model.load(_DRIFT_RANKS * 8)
    base = [slab.clone() for slab in model.slabs.base]
    base_weights = CopiedBaseWeights(model.slabs)
    worst: dict[bool, float] = {}
    restored = 0.0
    with torch.no_grad():
        for subtracting in (False, True):
            switcher = InPlaceSwitcher(model.slabs, model.pool, base_weights, subtracting=subtracting)
            draw, worst[subtracting] = random.Random(0), 0.0
            for _ in range(num_switches):
                switcher.switch(draw.choice([*keys, None]))
                worst[subtracting] = max(worst[subtracting], _distance(model, base, switcher.merged_key))
            switcher.switch(keys[0])
            switcher.forget(keys[0])
            restored = max(restored, _distance(model, base, None))
    return Drift(worst[True], worst[False], restored)


def _distance(model: MergeableModel, base: Sequence[torch.Tensor], key: str | None) -> float:
    """The worst layer's |weights - wanted| / |wanted|, with wanted = W0, or W0 + delta rounded once."""
    wanted = [slab.clone() for slab in base]
    if key is not None:
        for run in merge_runs(model.slabs, model.pool.shapes(key)):
            rows = wanted[run.slab][run.first : run.last]
            atmm.merge(rows, rows, *model.pool.stacked(key, run.names))
    worst = 0.0
    for slab, right in zip(model.slabs.base, wanted, strict=True):
        error = (slab.float() - right.float()).flatten(1).norm(dim=1)
        worst = max(worst, float((error / right.float().flatten(1).norm(dim=1)).max()))
    return worst
