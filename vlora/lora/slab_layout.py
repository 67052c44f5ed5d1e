"""The order of layers in the weight slabs, and which layers read the same input."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from atmm.quantized import Allocate, HeldWeight, StoredWeight
from vlora.lora.adapted_linear import AdaptedLinear

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
