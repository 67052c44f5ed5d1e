"""S-LoRA's adapters over several ranks (section 6): both factors are split, and ranks exchange hidden values x a^T.

Hidden values of all lanes of all adapters lie one after the other in one flat tensor, so that a collective moves
exactly what is needed, whatever the number of adapters and their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import atmm
from atmm.shares import HeldInput
from vlora.parallel import Group
from vlora.parallel.cut import FactorShape


class _Share(NamedTuple):
    """One lane's hidden values at one layer [stop - start, r], and what they are multiplied by."""

    lane: atmm.Lane
    hidden: Tensor
    bt: Tensor


class GatheredSites:
    """Column-parallel layers that read one input: their hidden values are gathered together, at the first of them."""

    def __init__(self, group: Group, num_layers: int) -> None:
        self._group = group
        self._factors: list[dict[str, atmm.Factors]] = [{} for _ in range(num_layers)]
        self._shares: dict[int, list[_Share]] = {}  # by layer, of those that have not called yet
        self._held = HeldInput()
        self._plan: atmm.SegmentPlan | None = None

    def layer(self, index: int) -> GatheredLayer:
        return GatheredLayer(self, index, self._factors[index])

    def take(self, index: int, x: Tensor, plan: atmm.SegmentPlan) -> list[_Share]:
        """The layer's shares for this input, each given once."""
        if all(factors.keys().isdisjoint(plan.keys) for factors in self._factors):
            return []
        if index not in self._shares or plan is not self._plan or not self._held.is_same(x):
            self._shares = self._gather(x, plan)
            self._plan = plan
            self._held.take(x)
        shares = self._shares.pop(index)
        if not self._shares:
            self._plan = None
            self._held.drop()
        return shares

    def _gather(self, x: Tensor, plan: atmm.SegmentPlan) -> dict[int, list[_Share]]:
        lanes = [
            (index, lane, factors[lane.key])
            for index, factors in enumerate(self._factors)
            for lane in plan.lanes
            if lane.key in factors
        ]
        own = [F.linear(x[lane.start : lane.stop], factors.a) for _, lane, factors in lanes]
        flat = self._group.all_gather(torch.cat([hidden.reshape(-1) for hidden in own]), "slora")
        pieces = flat.split([hidden.numel() for hidden in own], 1)
        shares: dict[int, list[_Share]] = {index: [] for index in range(len(self._factors))}
        for (index, lane, factors), piece in zip(lanes, pieces, strict=True):
            num_tokens = lane.stop - lane.start
            hidden = piece.reshape(self._group.size, num_tokens, -1).transpose(0, 1).reshape(num_tokens, -1)
            shares[index].append(_Share(lane, hidden, factors.bt))
        return shares


class _SplitLayer:
    """The split factors of one layer, by adapter."""

    def __init__(self, factors: dict[str, atmm.Factors]) -> None:
        self._factors = factors

    def attach(self, key: str, shape: FactorShape, factors: tuple[Tensor, Tensor]) -> None:
        assert shape.is_split
        self._factors[key] = atmm.Factors(*factors)

    def detach(self, key: str) -> None:
        self._factors.pop(key, None)


class GatheredLayer(_SplitLayer):
    """One of these layers."""

    def __init__(self, sites: GatheredSites, index: int, factors: dict[str, atmm.Factors]) -> None:
        super().__init__(factors)
        self._sites = sites
        self._index = index

    def add(self, y: Tensor, x: Tensor, plan: atmm.SegmentPlan) -> None:
        """Add every lane's delta to this rank's outputs y [T, d_out], in place."""
        for lane, hidden, bt in self._sites.take(self._index, x, plan):
            y[lane.start : lane.stop].addmm_(hidden, bt, alpha=lane.sign)


class ReducedLayer(_SplitLayer):
    """A row-parallel layer: ranks sum hidden values, and each adds the outputs that its factors make. The base model's
    all-reduce puts these together."""

    def __init__(self, group: Group) -> None:
        super().__init__({})
        self._group = group

    def add(self, y: Tensor, x: Tensor, plan: atmm.SegmentPlan) -> None:
        """Add every lane's delta to y [T, d_out], this rank's part of the sum, in place."""
        lanes = [(lane, self._factors[lane.key]) for lane in plan.lanes if lane.key in self._factors]
        if not lanes:
            return
        own = [F.linear(x[lane.start : lane.stop], factors.a) for lane, factors in lanes]
        flat = self._group.all_reduce(torch.cat([hidden.reshape(-1) for hidden in own]), "slora")
        for (lane, factors), hidden in zip(lanes, flat.split([part.numel() for part in own]), strict=True):
            width = factors.bt.shape[1]
            outputs = y[lane.start : lane.stop, self._group.rank * width : (self._group.rank + 1) * width]
            outputs.addmm_(hidden.view(lane.stop - lane.start, -1), factors.bt, alpha=lane.sign)


def gathered(group: Group, num_layers: int) -> Sequence[GatheredLayer]:
    """For layers that read one input, in the order they are called."""
    sites = GatheredSites(group, num_layers)
    return [sites.layer(index) for index in range(num_layers)]
