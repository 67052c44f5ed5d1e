"""One-shot, exact switching between inference modes (V-LoRA section 4.4.1), with a shadow copy of the target weights.

W0 is never written. Merging an adapter is one pass `shadow = W0 + delta` over all layers, one call per run of
neighbouring layers; going back is re-pointing the parameters, so it is free and bit-exact however often it happens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

import atmm
from vlora.adapters import HostFactors
from vlora.memory.allocation import empty
from vlora.models.bank import AdapterBank
from vlora.models.slabs import WeightSlabs


@dataclasses.dataclass(frozen=True)
class MergeRun:
    """Neighbouring slab entries [first, last) adapted with one rank, merged in one call."""

    shape: tuple[int, int]
    first: int
    last: int
    names: tuple[str, ...]


class ModeSwitcher:
    """Puts `W0` or `W0 + delta` of one adapter under the language model."""

    def __init__(self, slabs: WeightSlabs, bank: AdapterBank) -> None:
        self._slabs = slabs
        self._bank = bank
        self._shadow: dict[tuple[int, int], torch.Tensor] = {}
        self._shadow_key: str | None = None
        self._shadow_names: frozenset[str] = frozenset()
        self.merged_key: str | None = None

    def switch(self, key: str | None) -> bool:
        """Put the merged weights of adapter `key` (None: W0) in place. Returns whether anything changed.

        The adapter must be resident in the bank. Layers it does not touch stay on W0.
        """
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
        """The adapter is gone: whatever the shadow holds of it may not be used again."""
        if self.merged_key == key:
            self.switch(None)
        if self._shadow_key == key:
            self._shadow_key = None

    def _merge(self, key: str) -> None:
        # While the shadow is being rewritten nothing may point into it half-built.
        self.switch(None)
        self._shadow_key = None
        names: list[str] = []
        for run in merge_runs(self._slabs, self._bank.ranks(key)):
            base = self._slabs.base[run.shape]
            if run.shape not in self._shadow:
                self._shadow[run.shape] = empty(base.shape, base.dtype, base.device)
            a, bt = self._bank.stacked(key, run.names)
            atmm.merge(self._shadow[run.shape][run.first : run.last], base[run.first : run.last], a, bt)
            names += run.names
        self._shadow_key = key
        self._shadow_names = frozenset(names)


def merge_runs(slabs: WeightSlabs, ranks: dict[str, int]) -> list[MergeRun]:
    """Cut an adapter's layers into runs of neighbouring slab entries of equal rank. ranks: by adapted layer."""
    runs: list[MergeRun] = []
    for name, (shape, index) in slabs.slots.items():
        if name not in ranks:
            continue
        last = runs[-1] if runs else None
        if last and (last.shape, last.last) == (shape, index) and ranks[last.names[0]] == ranks[name]:
            runs[-1] = MergeRun(shape, last.first, index + 1, (*last.names, name))
        else:
            runs.append(MergeRun(shape, index, index + 1, (name,)))
    return runs


def merge_fidelity(slabs: WeightSlabs, factors: Mapping[str, HostFactors], num_rows: int = 64) -> float:
    """How much of an adapter survives merging: 1 - |round(W0 + d) - W0 - d| / |d|, on evenly spread rows of every
    layer.

    1.0 loses nothing; an adapter that moves no language-model weight counts as 1.0, since merging it changes nothing.
    """
    lost = total = 0.0
    for name, pair in factors.items():
        if name not in slabs.slots:
            continue
        shape, index = slabs.slots[name]
        step = max(1, shape[0] // num_rows)
        weight = slabs.base[shape][index, ::step]
        delta = (pair.bt[:, ::step].float().t() @ pair.a.float()).to(weight.device)
        # The difference is taken in float32: exact enough for W0 of 16 bits, and 1.0 within rounding for float32
        # weights.
        merged = (weight.float() + delta).to(weight.dtype).float()
        lost += float((merged - weight.float() - delta).square().sum())
        total += float(delta.square().sum())
    return 1.0 if total == 0 else max(0.0, 1.0 - (lost / total) ** 0.5)
