"""Shards the language model in place; the vision tower, the embeddings and the output head stay whole on every rank.

The models' attention derives its number of heads from the width of q, k and v, so sharding these layers is sufficient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from atmm.matmul import linear
from vlora.lora.adapted_linear import AdaptedLinear
from vlora.lora.sharded import ReducedLayer, gathered
from vlora.lora.slab_layout import shared_inputs
from vlora.models.hf_model import HFModel
from vlora.parallel import ProcessGroup, ShardPlan

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
        for layer, place in zip(layers, gathered(group, len(layers)), strict=True):
            layer.others["gathered", group.size] = place


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
