"""One-shot switching between inference modes (V-LoRA section 4.4.1): the interface of all switchers, and merging."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import atmm
from atmm.quantized import QuantizedWeight
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.output_changes import merge_rescaled
from vlora.lora.weight_slabs import WeightSlabs
from vlora.parallel.adapter_sharding import parts_of


class ModeSwitcher(Protocol):
    """Sets the language model's weights to `W0` or to `W0 + delta` of one adapter.

    in_place: merged weights overwrite W0, so that every switch is a pass over the weights.
    """

    in_place: bool
    merged_key: str | None

    def switch(self, key: str | None) -> bool:
        """Apply the merged weights of adapter `key` (None: W0). Returns whether the weights changed.

        The adapter must be resident in the pool. Layers without a delta have W0. After a failed switch all layers have
        W0.
        """

    def forget(self, key: str) -> None:
        """Remove every trace of an adapter from the weights, because it is being evicted."""

    def shown(self, *, merged: bool) -> AbstractContextManager[None]:
        """Context in which the model's layers have the memory of W0, or of merged weights with any content.

        For captures of CUDA graphs, while nothing is merged.
        """


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
