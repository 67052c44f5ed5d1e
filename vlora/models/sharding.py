"""Shards the language model in place; the vision tower, the embeddings and the output head stay whole on every rank.

The models' attention derives its number of heads from the width of q, k and v, so sharding these layers is sufficient.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import atmm
from atmm.matmul import linear
from atmm.shrink_expand import Expand, ExpandPart, Shrink, ShrinkPart
from atmm.strategies.shared_shrink import CachedInput
from vlora.lora.adapted_linear import AdaptedLinear
from vlora.lora.weight_slabs import shared_inputs
from vlora.models.hf_model import HFModel
from vlora.parallel.adapter_sharding import FactorShape
from vlora.parallel.layer_sharding import ShardPlan
from vlora.parallel.process_group import ProcessGroup

_SAMPLE = 64  # values of each tensor that a fingerprint reads


class RowParallelLinear(AdaptedLinear):
    """A layer with inputs split over ranks. One all-reduce sums the outputs of the layer and its adapters."""

    group: ProcessGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        num_rows = input.numel() // self.in_features
        plan = self.scope.plan_for(num_rows)
        y = linear(input, self.stored, None)
        if plan is not None:
            self.add_deltas(y.view(num_rows, self.out_features), input.reshape(num_rows, self.in_features), plan)
        y = self.group.all_reduce(y, "base")
        return y if self.bias is None else y + self.bias


def plan_of(model_config: Any, rank: int, size: int) -> ShardPlan:
    """A rank's part of a model, from its transformers config. Raises BadConfig if the model cannot be sharded so."""
    text = model_config.text_config
    heads = text.num_attention_heads
    return ShardPlan(
        rank=rank,
        size=size,
        num_heads=heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        intermediate_size=text.intermediate_size,
    )


def shard(hf_model: HFModel, group: ProcessGroup) -> None:
    """Keep this rank's part of every linear layer of the language model, and move the model to the group's device.

    Raises:
        BadConfig: The model cannot be sharded over this number of ranks.
    """
    plan = plan_of(hf_model.config, group.rank, group.size)
    for name, layer in hf_model.language_linears.items():
        part = plan.shard(name, layer.in_features, layer.out_features)
        layer.weight.data = layer.weight.data[part.outputs.slice, part.inputs.slice].clone()
        if layer.bias is not None and part.by_columns:
            layer.bias.data = layer.bias.data[part.outputs.slice].clone()
        layer.in_features, layer.out_features = part.inputs.size, part.outputs.size
        layer.shard = part
        layer.site.d_in, layer.site.d_out = layer.in_features, layer.out_features
        if part.by_rows:
            layer.__class__ = RowParallelLinear
            summed: RowParallelLinear = layer  # type: ignore[assignment]
            summed.group = group
            layer.others["reduced", group.size] = ReducedLayer(group)
    _gather_together(hf_model.language_linears, group)
    hf_model.num_kv_heads = plan.kv_heads
    hf_model.move(group.device)


def _gather_together(linears: Mapping[str, AdaptedLinear], group: ProcessGroup) -> None:
    for names in shared_inputs(linears):
        layers = [linears[name] for name in names if linears[name].shard.by_columns]
        together = GatheredSites(group, len(layers))
        for index, layer in enumerate(layers):
            layer.others["gathered", group.size] = GatheredLayer(together, index)


def fingerprint(model: Any) -> str:
    """A hash of names, shapes and a sample of the weights. It differs between ranks that loaded different models."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        sample = tensor.flatten()
        if len(sample) > _SAMPLE:
            # Random with a fixed seed: equidistant samples would cover only a few columns, mostly the first.
            places = torch.randint(len(sample), (_SAMPLE,), generator=torch.Generator().manual_seed(0))
            sample = sample[places.to(sample.device)]
        digest.update(sample.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


class _Prepared(NamedTuple):
    """The prepared products of a plan for layers with the same input. expands: by layer, for layers with factors."""

    plan: atmm.SegmentPlan
    shrink: Shrink
    expands: dict[int, Expand]


class GatheredSites:
    """Column-parallel layers with the same input: the first call gathers the hidden values x a^T of all of them.

    The hidden values of all lanes of all adapters are one flat tensor, so that a collective moves no padding. The
    preparation for a plan is reused in steps with the same lanes until an adapter is attached or detached.
    """

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


@dataclasses.dataclass(frozen=True)
class GatheredLayer:
    """One layer of `GatheredSites`, in the order in which the model calls them."""

    sites: GatheredSites
    index: int

    def attach(self, key: str, shape: FactorShape, factors: tuple[Tensor, Tensor]) -> None:
        assert shape.kind == "gathered"
        self.sites.attach(self.index, key, atmm.Factors(*factors))

    def detach(self, key: str) -> None:
        self.sites.detach(self.index, key)

    def add(self, y: Tensor, x: Tensor, plan: atmm.SegmentPlan) -> None:
        """Add every lane's delta to this rank's outputs y [T, d_out], in place."""
        self.sites.add(self.index, y, x, plan)


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
