"""Switching with a shadow copy of the target weights, for machines with enough memory.

W0 is never written. Merging an adapter is one pass `shadow = W0 + delta` over all layers, with one call per run of
neighbouring layers. Switching back re-points the parameters to W0, which is free and always bit-exact.
"""

from __future__ import annotations

import torch

from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.merge import merge_layers, merge_runs
from vlora.lora.weight_slabs import WeightSlabs
from vlora.memory.huge_pages import empty


class ShadowSwitcher:
    """A `ModeSwitcher` that keeps W0 in the slabs and points the model to merged copies."""

    in_place = False

    def __init__(self, slabs: WeightSlabs, pool: AdapterPool) -> None:
        self._slabs = slabs
        self._pool = pool
        # Written at once, so that the system allocates the memory now. During the first merge that would delay all
        # requests and distort the cost model's measurement of a merge.
        self._shadow = {shape: empty(base.shape, base.dtype, base.device).zero_() for shape, base in slabs.base.items()}
        self._shadow_key: str | None = None
        self._shadow_names: frozenset[str] = frozenset()
        self.merged_key: str | None = None

    def switch(self, key: str | None) -> bool:
        if key == self.merged_key:
            return False
        if key is not None and key != self._shadow_key:
            self._merge(key)
        wanted = self._shadow_names if key is not None else frozenset()
        slots = self._slabs.slots
        for name, linear in self._slabs.linears.items():
            shape, index = slots[name]
            linear.weight.data = (self._shadow if name in wanted else self._slabs.base)[shape][index]
        self.merged_key = key
        return True

    def forget(self, key: str) -> None:
        """Invalidates the shadow's content if it belongs to the adapter."""
        if self.merged_key == key:
            self.switch(None)
        if self._shadow_key == key:
            self._shadow_key = None

    def base_rows(self, name: str, step: int) -> torch.Tensor:
        return self._slabs.entry(name)[::step]

    def _merge(self, key: str) -> None:
        # No parameter may point into the shadow while it is being rewritten.
        self.switch(None)
        self._shadow_key = None
        names: list[str] = []
        for run in merge_runs(self._slabs, self._pool.shapes(key)):
            base = self._slabs.base[run.shape]
            entries = slice(run.first, run.last)
            merge_layers(self._pool, key, run.names, self._shadow[run.shape][entries], base[entries])
            names += run.names
        self._shadow_key = key
        self._shadow_names = frozenset(names)
