"""Factors of adapters other than two dense matrices, at one layer."""

from __future__ import annotations

from typing import Protocol

import torch

import atmm
from vlora.lora.own_layers import ReplacedOutputs
from vlora.parallel.adapter_sharding import FactorShape, parts_of


class Placement(Protocol):
    """Adds the deltas of adapters with factors other than two dense matrices at a layer."""

    def attach(self, key: str, shape: FactorShape, factors: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Register an adapter's factors under its key. They are referenced, not copied."""
        ...

    def detach(self, key: str) -> None:
        """Remove an adapter; unknown keys are ignored."""
        ...

    def add(self, y: torch.Tensor, x: torch.Tensor, plan: atmm.SegmentPlan) -> None:
        """Add every lane's delta to y [T, d_out], in place. Lanes of other adapters add nothing."""
        ...


class BlockSites:
    """The sites of a layer's block-diagonal adapters (BD-LoRA), all with the same block side and number of blocks.

    Every block is a separate site, so that the zeros between blocks are neither stored nor multiplied.
    """

    def __init__(self, name: str, shape: FactorShape) -> None:
        d_in = shape.d_in // shape.parts if shape.kind == "blocks_a" else shape.d_in
        d_out = shape.d_out // shape.parts if shape.kind == "blocks_b" else shape.d_out
        self._sites = [atmm.Site(f"{name}[{block}]", d_in, d_out) for block in range(shape.parts)]
        self._places: list[tuple[slice, slice]] = []

    def attach(self, key: str, shape: FactorShape, factors: tuple[torch.Tensor, torch.Tensor]) -> None:
        parts = parts_of(shape, *factors)
        self._places = [(part.outputs, part.inputs) for part in parts]
        for site, part in zip(self._sites, parts, strict=True):
            site.factors[key] = atmm.Factors(part.a, part.bt)

    def detach(self, key: str) -> None:
        for site in self._sites:
            site.factors.pop(key, None)

    def add(self, y: torch.Tensor, x: torch.Tensor, plan: atmm.SegmentPlan) -> None:
        """Add every lane's delta to y [T, d_out], in place."""
        if self._sites[0].factors.keys().isdisjoint(plan.keys):
            return
        for site, (outputs, inputs) in zip(self._sites, self._places, strict=True):
            atmm.add_delta(y[:, outputs], x[:, inputs], site, plan)


def new_placement(site: str, shape: FactorShape) -> Placement:
    """An empty placement for factors of this shape's kind and number of parts. Sharding makes those over ranks."""
    return ReplacedOutputs() if shape.kind == "replaced" else BlockSites(site, shape)
