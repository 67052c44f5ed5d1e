"""The language model's target weights as slabs: all layers of one shape in one contiguous tensor [layers, out, in]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from vlora.lora.adapted_linear import AdaptedLinear
from vlora.memory.huge_pages import empty


class SlabSlot(NamedTuple):
    """The place of a layer's weight: the slab, by shape, and the entry in it."""

    shape: tuple[int, int]
    entry: int


class WeightSlabs:
    """Owns the base weights as slabs, with the loaded W0; the modules' parameters are views into them.

    Entries are ordered by module type, then by layer, so that an adapter's layers of one type are neighbours and are
    merged in one call.
    """

    def __init__(self, linears: Mapping[str, AdaptedLinear]) -> None:
        self.linears = linears
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name in sorted(linears, key=_type_then_layer):
            out_features, in_features = linears[name].weight.shape
            by_shape.setdefault((out_features, in_features), []).append(name)
        self.slots: dict[str, SlabSlot] = {}
        self.base: dict[tuple[int, int], torch.Tensor] = {}
        for shape, names in by_shape.items():
            weight = linears[names[0]].weight
            slab = empty([len(names), *shape], weight.dtype, weight.device)
            for index, name in enumerate(names):
                self.slots[name] = SlabSlot(shape, index)
                slab[index].copy_(linears[name].weight.data)
                # Freeing the module's own storage now keeps the peak at one extra layer, not one extra model.
                linears[name].weight.data = slab[index]
            self.base[shape] = slab

    @property
    def order(self) -> tuple[str, ...]:
        """Layer names in slab order, which is also the order of layers in an adapter's memory."""
        return tuple(self.slots)

    def entry(self, name: str) -> torch.Tensor:
        """The current content of a layer's slab entry, [out, in]."""
        shape, index = self.slots[name]
        return self.base[shape][index]

    @property
    def num_bytes(self) -> int:
        return sum(slab.numel() * slab.element_size() for slab in self.base.values())


def _type_then_layer(name: str) -> tuple[str, int]:
    """'model.language_model.layers.7.self_attn.q_proj' -> ('...self_attn.q_proj', 7)."""
    parts = name.split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if layer is None:
        return name, 0
    return ".".join(parts[:layer] + parts[layer + 1 :]), int(parts[layer])
