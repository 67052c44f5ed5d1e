"""Switching inside the slabs, for memory that has no room for a shadow copy: merged weights are written over W0.

There are two ways to do it. *Rewriting* starts from the mapped originals: `slab = W0 + delta`, or `slab = W0`, in one
pass, exact whatever came before. *Subtracting* stays in the slab: `slab -= delta`, then `slab += delta` of the next
adapter, each computed in float32 and rounded once. That does not bring back every bit, so weights drift a little
further with every adapter that comes and goes; layers that have drifted too far are rewritten.

On a CPU rewriting moves as many bytes as subtracting does once, so there is nothing to trade exactness for. On a GPU
the originals lie across the bus, which is many times slower than the device's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch

import atmm
from vlora.lora.adapter_pool import AdapterBank
from vlora.lora.base_weights import Originals
from vlora.lora.merge import merge_layers, merge_runs
from vlora.lora.weight_slabs import WeightSlabs
from vlora.parallel.adapter_sharding import dense

# A promise: |weights - W| / |W| of any layer, root mean square, is at most this at any time, W being W0 while nothing
# is merged and W0 + delta rounded once while something is. Rounding that sum to bfloat16 is 1.7e-3 off by itself.
MAX_DRIFT = 2e-3
# What a sample of a layer's rows may show of it; the rest is for the rows outside the sample. One of 2**15 values was
# up to 6 % short of the whole layer, one of 2**17 2 % (docs/decisions.md, 2026-11-22).
_SAMPLE_SHARE = 0.9
_SAMPLE_ROWS, _SAMPLE_VALUES = 32, 2**17  # at least so many of each, as far as there are


class InPlaceSwitcher:
    """A `ModeSwitcher` without a second copy of the target weights: what is merged lies where W0 lay."""

    in_place = True

    def __init__(self, slabs: WeightSlabs, bank: AdapterBank, originals: Originals, *, subtracting: bool) -> None:
        """slabs: as loaded. originals: of the same weights. subtracting: instead of rewriting at every switch."""
        self._slabs = slabs
        self._bank = bank
        self._originals = originals
        self._changed: set[str] = set()  # layers whose entries may differ from W0, by a delta or by drift
        self._torn = False  # a switch began and did not end
        self._samples: list[_Sample] = []
        if subtracting:
            for shape, slab in slabs.base.items():
                step = max(1, shape[0] // max(_SAMPLE_ROWS, -(-_SAMPLE_VALUES // shape[1])))
                names = tuple(name for name, slot in slabs.slots.items() if slot.shape == shape)
                self._samples.append(_Sample(shape, names, step, slab[:, ::step].clone()))
        self.merged_key: str | None = None

    def switch(self, key: str | None) -> bool:
        """See ModeSwitcher."""
        if key == self.merged_key and not self._torn:
            return False
        left, self.merged_key = self.merged_key, None
        subtracting = self._samples and not self._torn
        self._torn = True
        try:
            if subtracting:
                self._add(left, -1.0)
                self._add(key, 1.0)
                self._rewrite((self._outgrown(left) | self._drifted(key)) & self._changed, key)
            else:
                self._rewrite(self._changed | self._layers(key), key)
        except BaseException:
            self._restore()
            raise
        self.merged_key, self._torn = key, False
        return True

    def forget(self, key: str) -> None:
        """See ModeSwitcher. The factors may be gone already, so nothing is subtracted."""
        if self.merged_key == key:
            self._restore()

    def base_rows(self, name: str, step: int) -> torch.Tensor:
        """See ModeSwitcher. Never from the slabs: who asks may be a thread that reads adapters while weights change."""
        return self._originals.weight(name)[::step].to(self._slabs.entry(name).device)

    def _restore(self) -> None:
        """W0 everywhere, bit for bit. Until it is done, no weights count as merged and the next switch rewrites all."""
        self.merged_key, self._torn = None, True
        self._rewrite(self._changed, None)
        self._torn = False

    def _layers(self, key: str | None) -> set[str]:
        """The layers that an adapter changes."""
        return set() if key is None else self._bank.shapes(key).keys() & self._slabs.slots.keys()

    def _add(self, key: str | None, sign: float) -> None:
        """Add an adapter's deltas to the slabs, or take them off."""
        if key is None:
            return
        for run in merge_runs(self._slabs, self._bank.shapes(key)):
            self._changed.update(run.names)
            entries = self._slabs.base[run.shape][run.first : run.last]
            merge_layers(self._bank, key, run.names, entries, entries, sign)

    def _rewrite(self, names: Set[str], key: str | None) -> None:
        """Write layers anew from their originals: with the adapter's delta where it has one, else as they were."""
        merged = self._layers(key)
        for name in sorted(names):
            entry, original = self._slabs.entry(name), self._originals.weight(name)
            self._changed.add(name)
            if key is not None and name in merged:
                merge_layers(self._bank, key, (name,), entry[None], original[None].to(entry.device))
            else:
                entry.copy_(original)
                self._changed.discard(name)

    def _drifted(self, key: str | None) -> set[str]:
        """Layers whose sampled rows are too far from what rewriting them would have given."""
        runs = () if key is None else merge_runs(self._slabs, self._bank.shapes(key))
        drifted: set[str] = set()
        for shape, names, step, base in self._samples:
            wanted = base.clone()
            for run in runs:
                if run.shape == shape:
                    a, bt = self._dense(key or "", run.names)
                    rows = wanted[run.first : run.last]
                    atmm.merge(rows, rows, a, bt[:, :, ::step].contiguous())
            error = (self._slabs.base[shape][:, ::step].float() - wanted.float()).square().sum((1, 2))
            allowed = (_SAMPLE_SHARE * MAX_DRIFT) ** 2 * wanted.float().square().sum((1, 2))
            # Written so that a NaN counts as too far.
            drifted.update(names[index] for index in (~(error <= allowed)).nonzero()[:, 0].tolist())
        return drifted

    def _dense(self, key: str, names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of a MergeRun's layers as a [n, rank, in], bt [n, rank, out]."""
        return dense(self._bank.shapes(key)[names[0]], *self._bank.stacked(key, names))

    def _outgrown(self, key: str | None) -> set[str]:
        """Layers with a row whose delta is larger than the layer's rows of W0 are.

        Adding it rounds away most of that row, and subtracting would not bring it back; no sample need show it.
        """
        if key is None:
            return set()
        outgrown: set[str] = set()
        sizes = {sample.shape: sample.rows.float().square().sum(2).mean(1) for sample in self._samples}
        for run in merge_runs(self._slabs, self._bank.shapes(key)):
            a, bt = (factors.float() for factors in self._dense(key, run.names))
            rows = ((a @ a.transpose(1, 2)) @ bt).mul_(bt).sum(1)  # |row of bt^T a| squared, [layers, out]
            large = ~(rows.amax(1) <= sizes[run.shape][run.first : run.last])
            outgrown.update(run.names[index] for index in large.nonzero()[:, 0].tolist())
        return outgrown


class _Sample(NamedTuple):
    """Every `step`th row of W0 of all layers of a shape, [layers, rows, in]."""

    shape: tuple[int, int]
    names: tuple[str, ...]
    step: int
    rows: torch.Tensor
