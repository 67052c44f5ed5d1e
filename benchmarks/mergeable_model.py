"""The weights and adapters of a model with random weights, without an engine, for measurements of switching."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from atmm.quantized import Allocate
from vlora.bench.dummy import language_shapes, write_adapter
from vlora.lora import AdapterRegistry
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.weight_slabs import WeightSlabs
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.arena import PAGE_BYTES, Arena
from vlora.memory.host_to_device import Inline, make_transfer
from vlora.memory.huge_pages import empty
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
