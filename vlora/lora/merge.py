"""One-shot switching between inference modes (V-LoRA section 4.4.1): the interface of all switchers, and merging."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import atmm
from atmm.quantized import QuantizedWeight
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.output_changes import merge_rescaled
from vlora.lora.weight_slabs import WeightSlabs, held_weights
from vlora.parallel.adapter_sharding import parts_of


class ModeSwitcher(Protocol):
    """Sets the language model's weights to `W0` or to `W0 + delta` of one adapter.

    in_place: merged weights overwrite W0, so that every switch is a pass over the weights. shows_late: layers get the
    weights of a switch in `show` only: graphs have the addresses of both, and need no switch.
    """

    in_place: bool
    shows_late: bool
    merged_key: str | None

    def switch(self, key: str | None) -> bool:
        """Apply the merged weights of adapter `key` (None: W0). Returns whether the weights changed.

        The adapter must be resident in the pool. Layers without a delta have W0. After a failed switch all layers have
        W0.
        """

    def show(self, *, merged: bool | None = None) -> None:
        """Give the model's layers the memory of W0 or of merged weights (None: of the last switch)."""

    def forget(self, key: str) -> None:
        """Remove every trace of an adapter from the weights, because it is being evicted."""


@dataclasses.dataclass(frozen=True)
class MergeRun:
    """Neighbouring entries [first, last) of a slab with factors of one shape, merged in one call."""

    slab: int
    first: int
    last: int
    names: tuple[str, ...]


def merge_runs(slabs: WeightSlabs, shapes: Mapping[str, object]) -> list[MergeRun]:
    """Split an adapter's layers into runs of neighbouring slab entries with factors of equal shape.

    Args:
        shapes: The factors' shapes by adapted layer, or other values that are equal in a run.
    """
    runs: list[MergeRun] = []
    for name, (slab, index) in slabs.slots.items():
        if name not in shapes:
            continue
        last = runs[-1] if runs else None
        if last and (last.slab, last.last) == (slab, index) and shapes[last.names[0]] == shapes[name]:
            runs[-1] = MergeRun(slab, last.first, index + 1, (*last.names, name))
        else:
            runs.append(MergeRun(slab, index, index + 1, (name,)))
    return runs


def merge_layers(pool: AdapterPool, key: str, names: Sequence[str], out: Any, base: Any, sign: float = 1.0) -> None:
    """Write `base + sign * delta` into `out`, both [len(names), out, in], for the layers of a MergeRun (or a part of
    one). A rescaled delta is only merged with sign 1, from W0."""
    a, bt = pool.stacked(key, names)
    shape = pool.shapes(key)[names[0]]
    if shape.rows:
        merge_rescaled(out, base, a, bt)
        return
    parts = parts_of(shape, a, bt)
    if isinstance(out, QuantizedWeight):
        assert sign == 1, "only a shadow is quantized, and it is never restored by subtraction"
        atmm.merge_quantized(out, base, parts)
        return
    for part in parts:
        place = (slice(None), part.outputs, part.inputs)
        atmm.merge(out[place], base[place], part.a, part.bt, sign)


class ShadowSwitcher:
    """A `ModeSwitcher` that keeps W0 in the slabs and points the model to merged copies, for machines with the memory.

    Merging is one pass `shadow = W0 + delta` per run of neighbouring layers; switching back re-points the parameters,
    free and bit-exact. On a CPU layers without a delta point to W0. On a GPU the shadow has a copy of W0 for them, so
    that a captured graph holds for every adapter (docs/decisions/0046).
    """

    in_place = shows_late = False

    def __init__(self, slabs: WeightSlabs, pool: AdapterPool, *, complete: bool = False) -> None:
        """complete: layers without a delta have a copy of W0 in the shadow, instead of W0 itself; joined ones must."""
        assert complete or not slabs.groups, "joined layers have their weights in one place"
        self._slabs = slabs
        self._pool = pool
        self._complete = complete
        # Written at once, so that the system allocates the memory now. During the first merge that would delay all
        # requests and distort the cost model's measurement of a merge.
        self._joined = [slabs.allocate(w0.shape, w0.dtype, w0.device).copy_(w0) for w0 in slabs.joined]
        self._shadow = slabs.split(self._joined)
        layers = ((name, slabs.linears[name], *slot) for name, slot in slabs.slots.items())
        self._weights = held_weights(layers, slabs.base, self._shadow)
        self._weights += held_weights(slabs.groups, slabs.joined, self._joined)
        self._shadow_key: str | None = None
        self._dirty: frozenset[str] = frozenset()  # layers with another value than W0 in the shadow
        self.merged_key: str | None = None
        self._shows_merged = False

    def switch(self, key: str | None) -> bool:
        if key == self.merged_key:
            return False
        if key is not None and key != self._shadow_key:
            self._merge(key)
        self.merged_key = key
        if not self.shows_late:
            self.show()
        return True

    def show(self, *, merged: bool | None = None) -> None:
        merged = self.merged_key is not None if merged is None else merged
        if merged == self._shows_merged:
            return
        self._shows_merged = merged
        wanted = frozenset() if not merged else self._slabs.slots.keys() if self._complete else self._dirty
        for name, holder, w0, shadow in self._weights:
            holder.hold(shadow if name in wanted else w0)

    def forget(self, key: str) -> None:
        """Invalidates the shadow's content if it belongs to the adapter."""
        if self.merged_key == key:
            self.switch(None)
        if self._shadow_key == key:
            self._shadow_key = None

    def _merge(self, key: str) -> None:
        # No parameter may point into the shadow while it is being rewritten.
        self.switch(None)
        self._shadow_key = None
        runs = merge_runs(self._slabs, self._pool.shapes(key))
        names = frozenset(name for run in runs for name in run.names)
        stale = self._dirty - names if self._complete else ()
        self._dirty = names.union(stale)  # also if this fails
        for run in (*merge_runs(self._slabs, dict.fromkeys(stale)), *runs):
            base, shadow = (slabs[run.slab][run.first : run.last] for slabs in (self._slabs.base, self._shadow))
            if run.names[0] in stale:
                shadow.copy_(base)
            else:
                merge_layers(self._pool, key, run.names, shadow, base)
        self._shadow_key, self._dirty = key, names
