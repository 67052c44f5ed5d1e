"""Switching with a shadow copy of the target weights: where there is memory for one.

W0 is never written. Merging an adapter is one pass `shadow = W0 + delta` over all layers, one call per run of
neighbouring layers; going back is re-pointing the parameters, so it is free and bit-exact however often it happens.
"""

from __future__ import annotations

import torch

from vlora.lora.adapter_pool import AdapterBank
from vlora.lora.merge import merge_layers, merge_runs
from vlora.lora.weight_slabs import WeightSlabs
from vlora.memory.huge_pages import empty


class ShadowSwitcher:
    """A `ModeSwitcher` that leaves W0 in the slabs and points the model at merged copies of them."""

    in_place = False

    def __init__(self, slabs: WeightSlabs, bank: AdapterBank) -> None:
        self._slabs = slabs
        self._bank = bank
        # Written to at once, which is when a system finds the memory: a first merge that did would hold everybody up,
        # and look like the price of a merge to who learns it.
        self._shadow = {shape: empty(base.shape, base.dtype, base.device).zero_() for shape, base in slabs.base.items()}
        self._shadow_key: str | None = None
        self._shadow_names: frozenset[str] = frozenset()
        self.merged_key: str | None = None

    def switch(self, key: str | None) -> bool:
        """See ModeSwitcher."""
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
        """See ModeSwitcher. Whatever the shadow holds of the adapter may not be used again."""
        if self.merged_key == key:
            self.switch(None)
        if self._shadow_key == key:
            self._shadow_key = None

    def base_rows(self, name: str, step: int) -> torch.Tensor:
        """See ModeSwitcher."""
        return self._slabs.entry(name)[::step]

    def _merge(self, key: str) -> None:
        # While the shadow is being rewritten nothing may point into it half-built.
        self.switch(None)
        self._shadow_key = None
        names: list[str] = []
        for run in merge_runs(self._slabs, self._bank.shapes(key)):
            base = self._slabs.base[run.shape]
            entries = slice(run.first, run.last)
            merge_layers(self._bank, key, run.names, self._shadow[run.shape][entries], base[entries])
            names += run.names
        self._shadow_key = key
        self._shadow_names = frozenset(names)
