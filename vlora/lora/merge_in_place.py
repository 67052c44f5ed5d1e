"""Switching inside the slabs, for machines without memory for a shadow copy: merged weights overwrite W0.

There are two methods. *Rewriting* reads the mapped base weights: `slab = W0 + delta`, or `slab = W0`, in one pass, and
is always exact. *Subtracting* uses the slab alone: `slab -= delta`, then `slab += delta` of the next adapter, each
computed in float32 and rounded once. That does not restore every bit, so the weights drift with every merged adapter;
layers that have drifted too far are rewritten, and all changed layers before and after an adapter with DoRA.

On a CPU rewriting moves as many bytes as one subtraction, so it is always used. On a GPU the base weights are read over
the bus, which is many times slower than device memory.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch

import atmm
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.base_weights import BaseWeights
from vlora.lora.merge import merge_layers, merge_runs
from vlora.lora.weight_slabs import WeightSlabs
from vlora.parallel.adapter_sharding import dense

# Guaranteed upper bound of |weights - W| / |W| (root mean square) of every layer at any time, where W is W0 if nothing
# is merged, else W0 + delta rounded once. Rounding that sum to bfloat16 alone has an error of 1.7e-3.
MAX_DRIFT = 2e-3
# Share of the bound that applies to a sample of a layer's rows; the margin is for rows outside the sample. Samples of
# 2**15 values underestimated the layer's drift by up to 6 %, samples of 2**17 by 2 % (docs/decisions/0004).
SAMPLE_SHARE = 0.9
SAMPLE_ROWS, SAMPLE_VALUES = 32, 2**17  # minimum of each, or the whole layer


class InPlaceSwitcher:
    """A `ModeSwitcher` without a second copy of the target weights: merged weights overwrite W0."""

    in_place, shows_late = True, False

    def __init__(self, slabs: WeightSlabs, pool: AdapterPool, base_weights: BaseWeights, *, subtracting: bool) -> None:
        """Create a switcher over slabs with nothing merged.

        Args:
            base_weights: W0 of the same weights.
            subtracting: Subtract deltas, instead of rewriting the layers at every switch.
        """
        self._slabs = slabs
        self._pool = pool
        self._base_weights = base_weights
        self._changed: set[str] = set()  # layers that may differ from W0, by a delta or by drift
        self._torn = False  # a switch started and did not complete
        self._samples: list[_Sample] = []
        if subtracting:
            for number, slab in enumerate(slabs.base):
                _, d_out, d_in = slab.shape
                step = max(1, d_out // max(SAMPLE_ROWS, -(-SAMPLE_VALUES // d_in)))
                names = tuple(name for name, slot in slabs.slots.items() if slot.slab == number)
                self._samples.append(_Sample(number, names, step, slab[:, ::step].clone()))
        self.merged_key: str | None = None

    def switch(self, key: str | None) -> bool:
        if key == self.merged_key and not self._torn:
            return False
        left, self.merged_key = self.merged_key, None
        subtracting = self._samples and not self._torn and not (self._rescales(left) or self._rescales(key))
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

    def show(self, *, merged: bool | None = None) -> None:
        pass

    def forget(self, key: str) -> None:
        """Rewrites the layers instead of subtracting, because the factors may already be freed."""
        if self.merged_key == key:
            self._restore()

    @property
    def sampled_shapes(self) -> frozenset[tuple[int, int]]:
        """Shapes of the sampled rows of a layer, which are merged as well."""
        return frozenset((sample.rows.shape[1], sample.rows.shape[2]) for sample in self._samples)

    def _restore(self) -> None:
        """Restore the exact W0 in all layers. Until it completes, the next switch rewrites every changed layer."""
        self.merged_key, self._torn = None, True
        self._rewrite(self._changed, None)
        self._torn = False

    def _layers(self, key: str | None) -> set[str]:
        return set() if key is None else self._pool.shapes(key).keys() & self._slabs.slots.keys()

    def _rescales(self, key: str | None) -> bool:
        """Whether an adapter scales outputs (DoRA), which subtracting its delta does not undo."""
        return key is not None and any(shape.rows for shape in self._pool.shapes(key).values())

    def _add(self, key: str | None, sign: float) -> None:
        """Add an adapter's deltas to the slabs, or subtract them (sign -1)."""
        if key is None:
            return
        for run in merge_runs(self._slabs, self._pool.shapes(key)):
            self._changed.update(run.names)
            entries = self._slabs.base[run.slab][run.first : run.last]
            merge_layers(self._pool, key, run.names, entries, entries, sign)

    def _rewrite(self, names: Set[str], key: str | None) -> None:
        """Rewrite layers from their base weights, with the adapter's delta if it has one for the layer."""
        merged = self._layers(key)
        for name in sorted(names):
            entry, original = self._slabs.entry(name), self._base_weights.weight(name)
            self._changed.add(name)
            if key is not None and name in merged:
                merge_layers(self._pool, key, (name,), entry[None], original[None].to(entry.device))
            else:
                entry.copy_(original)
                self._changed.discard(name)

    def _drifted(self, key: str | None) -> set[str]:
        """Layers with sampled rows that differ too much from the result of rewriting them."""
        runs = () if key is None else merge_runs(self._slabs, self._pool.shapes(key))
        drifted: set[str] = set()
        for slab, names, step, base in self._samples:
            wanted = base.clone()
            for run in runs:
                if run.slab == slab:
                    a, bt = self._dense(key or "", run.names)
                    rows = wanted[run.first : run.last]
                    atmm.merge(rows, rows, a, bt[:, :, ::step].contiguous())
            error = (self._slabs.base[slab][:, ::step].float() - wanted.float()).square().sum((1, 2))
            allowed = (SAMPLE_SHARE * MAX_DRIFT) ** 2 * wanted.float().square().sum((1, 2))
            # Negated so that a NaN counts as drifted.
            drifted.update(names[index] for index in (~(error <= allowed)).nonzero()[:, 0].tolist())
        return drifted

    def _dense(self, key: str, names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of a MergeRun's layers as a [n, rank, in], bt [n, rank, out]."""
        return dense(self._pool.shapes(key)[names[0]], *self._pool.stacked(key, names))

    def _outgrown(self, key: str | None) -> set[str]:
        """Layers in which the delta of a row is larger than the average row of W0.

        Adding such a delta rounds away most of the row, and subtracting does not restore it. The sampled rows may not
        include that row.
        """
        if key is None:
            return set()
        outgrown: set[str] = set()
        sizes = {sample.slab: sample.rows.float().square().sum(2).mean(1) for sample in self._samples}
        for run in merge_runs(self._slabs, self._pool.shapes(key)):
            a, bt = (factors.float() for factors in self._dense(key, run.names))
            rows = ((a @ a.transpose(1, 2)) @ bt).mul_(bt).sum(1)  # |row of bt^T a| squared, [layers, out]
            large = ~(rows.amax(1) <= sizes[run.slab][run.first : run.last])
            outgrown.update(run.names[index] for index in large.nonzero()[:, 0].tolist())
        return outgrown


class _Sample(NamedTuple):
    """Every `step`th row of W0 of all layers of a slab, [layers, rows, in]."""

    slab: int
    names: tuple[str, ...]
    step: int
    rows: torch.Tensor
