"""Switching with a shadow copy of the target weights, for machines with enough memory.

W0 is never written. Merging an adapter is one pass `shadow = W0 + delta` over its layers, with one call per run of
neighbouring layers. Switching back re-points the parameters to W0, which is free and always bit-exact.

On a CPU layers without a delta point to W0, which copies nothing. On a GPU the shadow has a copy of W0 for them: merged
weights then have the same addresses for every adapter, and a captured CUDA graph holds for all (docs/decisions/0046).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.merge import merge_layers, merge_runs
from vlora.lora.weight_slabs import WeightSlabs, held_weights


class ShadowSwitcher:
    """A `ModeSwitcher` that keeps W0 in the slabs and points the model to merged copies."""

    in_place = False

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

    def switch(self, key: str | None) -> bool:
        if key == self.merged_key:
            return False
        if key is not None and key != self._shadow_key:
            self._merge(key)
        self._show(merged=key is not None)
        self.merged_key = key
        return True

    @contextmanager
    def shown(self, *, merged: bool) -> Iterator[None]:
        self._show(merged=merged)
        try:
            yield
        finally:
            self._show(merged=False)

    def _show(self, *, merged: bool) -> None:
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
