"""Factors of adapters other than two dense matrices, at one layer."""

from __future__ import annotations

from typing import Protocol

import torch

import atmm
from vlora.lora.block_diagonal import BlockSites
from vlora.lora.own_layers import ReplacedOutputs
from vlora.parallel.adapter_sharding import FactorShape


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


def new_placement(site: str, shape: FactorShape) -> Placement:
    """An empty placement for factors of this shape's kind and number of parts. Sharding makes those over ranks."""
    return ReplacedOutputs() if shape.kind == "replaced" else BlockSites(site, shape)
