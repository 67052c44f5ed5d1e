"""The language model's target weights as slabs: all layers of one shape in one contiguous tensor [layers, out, in].

On a GPU the layers that read one input are joined: their weights are adjacent, [groups, sum of out, in], so that one
product computes them. A slab is then the rows of one member of every group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from atmm.quantized import Allocate, HeldWeight, StoredWeight
from vlora.lora.adapted_linear import AdaptedLinear, JoinedWeights
from vlora.memory.arena import empty

# Layers that read the same input tensor: one shrink can serve all of them.
_SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def shared_inputs(names: Collection[str]) -> list[list[str]]:
    """The names of adaptable layers, grouped by input tensor."""
    groups: list[list[str]] = []
    taken: set[str] = set()
    for name in names:
        parent, _, leaf = name.rpartition(".")
        members = [name]
        for leaves in _SHARED_INPUT:
            if leaf in leaves:
                members = [f"{parent}.{other}" for other in leaves if f"{parent}.{other}" in names]
        if name not in taken:
            taken.update(members)
            groups.append(members)
    return groups


def groups_by_shape(linears: Mapping[str, nn.Linear], *, join: bool) -> list[list[list[str]]]:
    """The layers' names in groups with adjacent weights; the groups of equal shapes form one list.

    Args:
        join: Group layers by their input. Otherwise each layer is a group.

    Returns:
        Groups ordered by module type, then by layer.
    """
    names = sorted(linears, key=_type_then_layer)
    kinds: dict[tuple[torch.Size, ...], list[list[str]]] = {}
    for members in shared_inputs(names) if join else [[name] for name in names]:
        kinds.setdefault(tuple(linears[name].weight.shape for name in members), []).append(members)
    return list(kinds.values())


def moved(groups: Sequence[Sequence[AdaptedLinear]], allocate: Allocate) -> StoredWeight:
    """The weights of groups of equal shapes, [groups, sum of out, in]; the layers' weights become views of it."""
    heights = [layer.out_features for layer in groups[0]]
    weight = groups[0][0].weight
    slab = allocate([len(groups), sum(heights), weight.shape[1]], weight.dtype, weight.device)
    for number, layers in enumerate(groups):
        for layer, rows in zip(layers, slab[number].split(heights), strict=True):
            # Freeing the module's own storage now keeps the peak at one extra layer, not one extra model.
            layer.hold(HeldWeight.of(rows.copy_(layer.weight.data if layer.quantized is None else layer.quantized)))
    return slab


class _Holder(Protocol):
    def hold(self, weight: HeldWeight) -> None: ...


def held_weights(
    holders: Iterable[tuple[str, _Holder, int, int]], base: Sequence[Any], shadow: Sequence[Any]
) -> list[tuple[str, _Holder, HeldWeight, HeldWeight]]:
    """The weights between which a switch chooses, made before it.

    Args:
        holders: A layer's name, what holds its weight, and the place of the weight: the slab and the entry in it.

    Returns:
        The name, the holder, its W0 and its merged weight.
    """
    return [
        (name, holder, HeldWeight.of(base[slab][entry]), HeldWeight.of(shadow[slab][entry]))
        for name, holder, slab, entry in holders
    ]


def _type_then_layer(name: str) -> tuple[str, int]:
    """'model.language_model.layers.7.self_attn.q_proj' -> ('...self_attn.q_proj', 7)."""
    parts = name.split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if layer is None:
        return name, 0
    return ".".join(parts[:layer] + parts[layer + 1 :]), int(parts[layer])


class SlabSlot(NamedTuple):
    """The place of a layer's weight: the slab, an index of `WeightSlabs.base`, and the entry in it."""

    slab: int
    entry: int


class WeightSlabs:
    """Owns the base weights as slabs, with the loaded W0; the modules' parameters are views into them.

    Entries are ordered by module type, then by layer, so that an adapter's layers of one type are neighbours and are
    merged in one call.

    Attributes:
        slots: the place of every layer, in slab order, which is also the order of layers in an adapter's memory.
        joined: W0 in its memory, [groups, sum of out, in]: tensors or instances of `QuantizedWeight`. Equal to `base`
            if no layers are joined.
        base: W0 by slab, [layers, out, in], as views of `joined` with contiguous rows.
        groups: the joined layers: the first one's name, their weights, and their place in `joined`: tensor and entry.
    """

    def __init__(
        self,
        linears: Mapping[str, AdaptedLinear],
        *,
        join: bool = False,
        allocate: Allocate = empty,
    ) -> None:
        """Move the layers' weights into slabs from `allocate`. join: make weights of layers with one input adjacent."""
        self.allocate = allocate
        self.linears = linears
        self.slots: dict[str, SlabSlot] = {}
        self.joined: list[Any] = []
        self.base: list[Any] = []
        self.groups: list[tuple[str, JoinedWeights, int, int]] = []
        self._heights: list[list[int]] = []
        for kind, groups in enumerate(groups_by_shape(linears, join=join)):
            layers = [[linears[name] for name in names] for names in groups]
            for place, names in enumerate(zip(*groups, strict=True), len(self.base)):
                self.slots.update({name: SlabSlot(place, entry) for entry, name in enumerate(names)})
            self.joined.append(moved(layers, allocate))
            self._heights.append([layer.out_features for layer in layers[0]])
            self.base += self.joined[-1].split(self._heights[-1], 1)
            for entry, members in enumerate(layers if len(layers[0]) > 1 else ()):
                weights = JoinedWeights(members, self.joined[-1][entry])
                self.groups.append((groups[entry][0], weights, kind, entry))
                for layer in members:
                    layer.joined = weights

    def split(self, joined: Sequence[Any]) -> list[Any]:
        """Views of tensors with the shapes of `joined`, by slab: [layers, out, in]."""
        pairs = zip(joined, self._heights, strict=True)
        return [slab for tensor, heights in pairs for slab in tensor.split(heights, 1)]

    @property
    def order(self) -> tuple[str, ...]:
        """Layer names in slab order."""
        return tuple(self.slots)

    @property
    def shapes(self) -> frozenset[tuple[int, int]]:
        return frozenset((slab.shape[1], slab.shape[2]) for slab in self.base)

    def entry(self, name: str) -> Any:
        """The current content of a layer's slab entry, [out, in]."""
        slab, index = self.slots[name]
        return self.base[slab][index]

    @property
    def num_bytes(self) -> int:
        return sum(slab.nbytes for slab in self.joined)
