"""The language model's target weights as slabs: all layers of one shape in one contiguous tensor [layers, out, in].

On a GPU the layers that read one input are joined: their weights are adjacent, [groups, sum of out, in], so that one
product computes them. A slab is then the rows of one member of every group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atmm.quantized import Allocate
from vlora.lora.adapted_linear import AdaptedLinear
from vlora.lora.joined_weights import JoinedWeights
from vlora.lora.slab_layout import groups_by_shape, moved
from vlora.memory.huge_pages import empty


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
