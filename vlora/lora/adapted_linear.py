"""Linear layers that add each token's adapter delta, created by swapping the class of the model's layers.

Swapping `__class__` preserves parameter names, state dicts and isinstance checks, and has no measurable cost. Wrapper
modules and forward hooks cost 20 to 30 % of a small call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import atmm
from atmm.matmul import joins, linear, linears
from atmm.quantized import HeldWeight, StoredLinear, StoredWeight
from atmm.strategies.shared_shrink import CachedInput
from vlora.lora.output_changes import OutputChange, apply_changes, changed_inputs, undo_changes
from vlora.lora.own_layers import Placement, new_placement
from vlora.parallel.adapter_sharding import FactorShape
from vlora.parallel.layer_sharding import LinearShard


class JoinedWeights:
    """The weights of layers with the same input as one weight [sum of out, in], and their biases as one bias.

    Attributes:
        weight: a view of W0 or of merged weights, as the layers' own weights are; replaced at every switch.
        bias: [sum of out], or None if no layer has one.
    """

    def __init__(self, layers: Sequence[nn.Linear], weight: StoredWeight) -> None:
        """Join the layers' biases, which become views of one tensor. weight: their weights, one below the other."""
        self.weight: Any = weight
        self.bias: torch.Tensor | None = None
        if any(layer.bias is not None for layer in layers):
            zero = torch.zeros((), dtype=weight.dtype, device=weight.device)
            heights = [layer.out_features for layer in layers]
            self.bias = torch.cat(
                [
                    (zero if layer.bias is None else layer.bias.data.to(zero.device)).expand(layer.out_features)
                    for layer in layers
                ]
            )
            for layer, part in zip(layers, self.bias.split(heights), strict=True):
                if layer.bias is not None:
                    layer.bias = nn.Parameter(part, requires_grad=False)  # which may be on another device

    def hold(self, weight: HeldWeight) -> None:
        """Use another weight, as `StoredLinear.hold`."""
        self.weight = weight.stored

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The layers' outputs for x [T, in], side by side: [T, sum of out]."""
        return linear(x, self.weight, self.bias)


class LaneScope:
    """The active lanes of all layers that share the scope.

    Lanes are ranges of units: tokens for the language model, patches or tiles for the vision tower. If a layer has
    a multiple or a fraction of the units as rows (class tokens, patch mergers), its lanes are scaled in proportion.
    """

    def __init__(self) -> None:
        self._plan: atmm.SegmentPlan | None = None  # None: no active lanes
        self._last = atmm.SegmentPlan(0, ())
        self._scaled: dict[int, atmm.SegmentPlan] = {}  # of the last plan, by rows

    @contextmanager
    def lanes(self, num_units: int, lanes: Sequence[atmm.Lane]) -> Iterator[None]:
        """Context in which every layer of the scope adds the deltas of these lanes."""
        assert self._plan is None, "lane scopes do not nest"
        if lanes:
            plan = atmm.SegmentPlan(num_units, lanes)
            if (plan.num_tokens, plan.lanes) != (self._last.num_tokens, self._last.lanes):
                self._last = plan
                self._scaled.clear()
            # Decode steps of the same requests have equal lanes, so the prepared plan is reused.
            self._plan = self._last
        try:
            yield
        finally:
            self._plan = None

    @contextmanager
    def replaced(self, plan: atmm.SegmentPlan | None) -> Iterator[None]:
        """Context in which layers use this plan (None: no lanes). It must cover exactly the rows of their inputs."""
        before, self._plan = self._plan, plan
        try:
            yield
        finally:
            self._plan = before

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context without active lanes, for calls that set their own lanes."""
        plan, self._plan = self._plan, None
        try:
            yield
        finally:
            if plan is not None:
                self._last, self._scaled = plan, {}
            self._plan = plan

    def plan_for(self, num_rows: int) -> atmm.SegmentPlan | None:
        plan = self._plan
        if plan is None or plan.num_tokens == num_rows:
            return plan
        scaled = self._scaled.get(num_rows)
        if scaled is None:
            units = plan.num_tokens
            ends = ((lane, lane.start * num_rows // units, lane.stop * num_rows // units) for lane in plan.lanes)
            lanes = [lane._replace(start=start, stop=stop) for lane, start, stop in ends]
            scaled = self._scaled[num_rows] = atmm.SegmentPlan(num_rows, lanes)
        return scaled


class AdaptedLinear(StoredLinear):
    """An `nn.Linear` of the base model plus the deltas of its scope's lanes. Created by `adapt`, never constructed.

    site: holds dense factors. changes: other changes by adapter. others: placements of other factor kinds, by kind and
    number of parts. shard: the part of the model's layer that is on this rank. joined: its weight with those of its
    siblings, where they are adjacent.
    """

    site: atmm.Site
    changes: dict[str, OutputChange]
    others: dict[tuple[str, int], Placement]
    shard: LinearShard
    scope: LaneScope
    siblings: Siblings | None
    joined: JoinedWeights | None

    def attach(self, key: str, shape: FactorShape, factors: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Register the factors for lanes of `key`. They are referenced, not copied."""
        if shape.rows:
            factors, self.changes[key] = OutputChange.split(shape, *factors)
        if shape.kind != "dense":
            kind = (shape.kind, shape.parts)
            if kind not in self.others:
                self.others[kind] = new_placement(self.site.name, shape)
            self.others[kind].attach(key, shape, factors)
        elif shape.rank:
            self.site.factors[key] = atmm.Factors(*factors)

    def detach(self, key: str) -> None:
        self.site.factors.pop(key, None)
        self.changes.pop(key, None)
        for other in self.others.values():
            other.detach(key)

    def add_deltas(self, y: torch.Tensor, x: torch.Tensor, plan: atmm.SegmentPlan) -> None:
        """Add the deltas of the plan's lanes to y [T, d_out], in place. x: [T, d_in]."""
        if self.changes:
            undo_changes(y, self.changes, self.bias, plan)
        atmm.add_delta(y, x, self.site, plan)
        for other in self.others.values():
            other.add(y, x, plan)
        if self.changes:
            apply_changes(y, self.changes, self.bias, plan)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        num_rows = input.numel() // self.in_features
        plan = self.scope.plan_for(num_rows)
        if self.siblings is not None and (self.joined or (plan is not None and joins(num_rows, self.weight))):
            return self.siblings.output(self, input, plan)
        if self.changes and plan is not None:
            input = changed_inputs(input, self.changes, plan)
        x = input if plan is None else input.reshape(num_rows, self.in_features)
        atmm.begin_deltas(x, self.site, plan)
        y = linear(input, self.stored, self.bias)
        if plan is not None:
            self.add_deltas(y.view(num_rows, self.out_features), x, plan)
        return y


class Siblings:
    """Layers with the same input, computed together when the first of them is called.

    All their deltas then need the kernel launches of one layer, or one call on a CPU; either costs more than the
    arithmetic of a small layer. Joined weights need one product. The outputs for one input and plan are kept until each
    layer has read its own once.
    """

    def __init__(self, layers: Sequence[AdaptedLinear]) -> None:
        group = layers[0].site.group
        assert group is not None and [layer.site for layer in layers] == list(group.sites), "siblings form a site group"
        self._layers = layers
        self._group = group
        self._widths = [layer.out_features for layer in layers]
        self._cached_input = CachedInput()
        self._plan: atmm.SegmentPlan | None = None
        self._outputs: dict[AdaptedLinear, torch.Tensor] = {}
        for layer in layers:
            layer.siblings = self

    def output(self, layer: AdaptedLinear, input: torch.Tensor, plan: atmm.SegmentPlan | None) -> torch.Tensor:
        """The layer's output for this input with the plan's lanes, [..., d_out]; a view of a larger tensor."""
        if plan is not self._plan or layer not in self._outputs or not self._cached_input.matches(input):
            self._compute(input, plan)
        y = self._outputs.pop(layer)
        if not self._outputs:
            self._cached_input.clear()
        return y

    def outputs(self, input: torch.Tensor, plan: atmm.SegmentPlan | None) -> tuple[torch.Tensor, ...]:
        """The outputs of all layers for this input, in their order: [..., d_out] each, views of one tensor."""
        x = input.reshape(-1, self._layers[0].in_features)
        joined = self._layers[0].joined
        atmm.begin_deltas(x, self._group.sites[0], plan)
        y = linears(x, self._layers) if joined is None else joined.product(x)
        if plan is not None:
            special = any(layer.changes or layer.others for layer in self._layers)
            parts = list(zip(self._layers, y.split(self._widths, 1), strict=True)) if special else []
            for layer, part in parts:
                if layer.changes:
                    undo_changes(part, layer.changes, layer.bias, plan)
            atmm.add_deltas(y, x, self._group, plan)
            for layer, part in parts:
                for other in layer.others.values():
                    other.add(part, x, plan)
                if layer.changes:
                    apply_changes(part, layer.changes, layer.bias, plan)
        return y.view(*input.shape[:-1], -1).split_with_sizes(self._widths, -1)

    def _compute(self, input: torch.Tensor, plan: atmm.SegmentPlan | None) -> None:
        self._outputs = dict(zip(self._layers, self.outputs(input, plan), strict=True))
        self._plan = plan
        self._cached_input.set(input)


def outputs_of(layers: Sequence[AdaptedLinear], x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The outputs of all layers that read x [..., T, d_in], which are views of one tensor where that is free."""
    siblings = None if "forward" in vars(layers[0]) else getattr(layers[0], "siblings", None)  # replaced by a training
    num_rows = x.numel() // x.shape[-1]
    if siblings is None or not (layers[0].joined or joins(num_rows, layers[0].weight)):
        return [layer(x) for layer in layers]
    return siblings.outputs(x, layers[0].scope.plan_for(num_rows))


def adapt(linear: nn.Linear, name: str, scope: LaneScope) -> AdaptedLinear:
    """Convert a linear layer of the model, in place, into one that adapters can target under `name`."""
    assert type(linear) is nn.Linear, f"{name} is a {type(linear).__name__}, not a plain linear layer"
    linear.__class__ = AdaptedLinear
    adapted: AdaptedLinear = linear  # type: ignore[assignment]
    adapted.site = atmm.Site(name, linear.in_features, linear.out_features)
    adapted.changes = {}
    adapted.others = {}
    adapted.shard = LinearShard.whole(linear.in_features, linear.out_features)
    adapted.scope = scope
    adapted.siblings = None
    adapted.joined = None
    return adapted
