"""Adapters sharded over several ranks (S-LoRA section 6): both factors are split; ranks exchange hidden values x a^T.

The hidden values of all lanes of all adapters are concatenated in one flat tensor, so that a collective moves no
padding, whatever the number of adapters and their LoRA ranks. The preparation for a plan is reused in steps with the
same lanes until an adapter is attached or detached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

import atmm
from atmm.shrink_expand import Expand, ExpandPart, Shrink, ShrinkPart
from atmm.strategies.shared_shrink import CachedInput
from vlora.parallel import ProcessGroup
from vlora.parallel.adapter_sharding import FactorShape


class _Prepared(NamedTuple):
    """The prepared products of a plan for layers with the same input. expands: by layer, for layers with factors."""

    plan: atmm.SegmentPlan
    shrink: Shrink
    expands: dict[int, Expand]


class GatheredSites:
    """Column-parallel layers with the same input: the first call gathers the hidden values of all of them."""

    def __init__(self, group: ProcessGroup, num_layers: int) -> None:
        self._group = group
        self._factors: list[dict[str, atmm.Factors]] = [{} for _ in range(num_layers)]
        self._prepared: _Prepared | None = None
        self._hidden: Tensor | None = None
        self._waiting: set[int] = set()  # layers that have not read these hidden values yet
        self._cached_input = CachedInput()

    def attach(self, index: int, key: str, factors: atmm.Factors) -> None:
        self._factors[index][key] = factors
        self._prepared = None

    def detach(self, index: int, key: str) -> None:
        self._factors[index].pop(key, None)
        self._prepared = None

    def add(self, index: int, y: Tensor, x: Tensor, plan: atmm.SegmentPlan) -> None:
        """Add every lane's delta to the layer's outputs y, in place."""
        prepared = self._prepared
        if prepared is None or prepared.plan is not plan:
            prepared = self._prepared = self._prepare(plan)
            self._waiting.clear()
        expand = prepared.expands.get(index)
        if expand is None:
            return
        if self._hidden is None or index not in self._waiting or not self._cached_input.matches(x):
            self._hidden = self._group.all_gather(prepared.shrink(x), "slora").view(-1)
            self._waiting = set(prepared.expands)
            self._cached_input.set(x)
        expand(y, self._hidden)
        self._waiting.remove(index)
        if not self._waiting:
            self._hidden = None
            self._cached_input.clear()

    def _prepare(self, plan: atmm.SegmentPlan) -> _Prepared:
        lanes = [
            (index, lane, factors[lane.key])
            for index, factors in enumerate(self._factors)
            for lane in plan.lanes
            if lane.key in factors
        ]
        shrink = Shrink([ShrinkPart(lane, factors.a) for _, lane, factors in lanes], plan.num_tokens)
        parts_by_layer: dict[int, list[ExpandPart]] = {}
        for (index, lane, factors), place in zip(lanes, shrink.places, strict=True):
            everywhere = [rank * shrink.size + place for rank in range(self._group.size)]
            parts_by_layer.setdefault(index, []).append(ExpandPart(lane, factors.bt, everywhere))
        expands = {index: Expand(parts, plan.num_tokens) for index, parts in parts_by_layer.items()}
        return _Prepared(plan, shrink, expands)


class GatheredLayer:
    def __init__(self, sites: GatheredSites, index: int) -> None:
        self._sites = sites
        self._index = index

    def attach(self, key: str, shape: FactorShape, factors: tuple[Tensor, Tensor]) -> None:
        assert shape.kind == "gathered"
        self._sites.attach(self._index, key, atmm.Factors(*factors))

    def detach(self, key: str) -> None:
        self._sites.detach(self._index, key)

    def add(self, y: Tensor, x: Tensor, plan: atmm.SegmentPlan) -> None:
        """Add every lane's delta to this rank's outputs y [T, d_out], in place."""
        self._sites.add(self._index, y, x, plan)


class ReducedLayer:
    """A row-parallel layer: ranks sum the hidden values, and each computes a slice of the adapter's outputs.

    The base model's all-reduce combines the slices.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._factors: dict[str, atmm.Factors] = {}
        self._width = 0  # outputs that a rank computes
        self._prepared: tuple[atmm.SegmentPlan, Shrink, Expand] | None = None

    def attach(self, key: str, shape: FactorShape, factors: tuple[Tensor, Tensor]) -> None:
        assert shape.kind == "reduced"
        self._factors[key] = atmm.Factors(*factors)
        self._width = shape.d_out
        self._prepared = None

    def detach(self, key: str) -> None:
        self._factors.pop(key, None)
        self._prepared = None

    def add(self, y: Tensor, x: Tensor, plan: atmm.SegmentPlan) -> None:
        """Add every lane's delta to y [T, d_out], this rank's part of the sum, in place."""
        if self._factors.keys().isdisjoint(plan.keys):
            return
        if self._prepared is None or self._prepared[0] is not plan:
            self._prepared = self._prepare(plan)
        _, shrink, expand = self._prepared
        first = self._group.rank * self._width
        expand(y[:, first : first + self._width], self._group.all_reduce(shrink(x), "slora"))

    def _prepare(self, plan: atmm.SegmentPlan) -> tuple[atmm.SegmentPlan, Shrink, Expand]:
        lanes = [(lane, self._factors[lane.key]) for lane in plan.lanes if lane.key in self._factors]
        shrink = Shrink([ShrinkPart(lane, factors.a) for lane, factors in lanes], plan.num_tokens)
        parts = [
            ExpandPart(lane, factors.bt, [place]) for (lane, factors), place in zip(lanes, shrink.places, strict=True)
        ]
        return plan, shrink, Expand(parts, plan.num_tokens)


def gathered(group: ProcessGroup, num_layers: int) -> Sequence[GatheredLayer]:
    """Create the layers of a `GatheredSites`, in the order in which the model calls them."""
    sites = GatheredSites(group, num_layers)
    return [GatheredLayer(sites, index) for index in range(num_layers)]
