"""The layers of a model that a base executor holds: selection, groups of one input, shards, and their fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from vlora.split.frames import Group, LayerInfo

SHARED_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
)
"""Layers of one parent that transformers calls with the same input. One call for all of them saves round trips; a
model that calls them with different inputs still computes the same values.
"""
_SAMPLED_ROWS = 4


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear layer of transformers: `nn.Linear`, or GPT-2's `Conv1D`."""
    return type(module) in (nn.Linear, Conv1D)


def frozen_layers(model: nn.Module, is_linear: Callable[[nn.Module], bool] = is_plain) -> dict[str, nn.Module]:
    """The linear layers by name, without heads that share an embedding's weights."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) and id(module.weight) not in embeddings
    }


def groups_of(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names of the layers, those that read one input together."""
    known = list(names)
    found: dict[str, tuple[str, ...]] = {}
    for name in known:
        if name in found:
            continue
        parent, dot, leaf = name.rpartition(".")
        sharing = next((leaves for leaves in SHARED_INPUTS if leaf in leaves), (leaf,))
        members = tuple(full for full in (f"{parent}{dot}{other}" for other in sharing) if full in known)
        found |= dict.fromkeys(members, members)
    return list(dict.fromkeys(found.values()))


def weight_of(layer: nn.Module) -> torch.Tensor:
    """The weight as [outputs, inputs]; a view for `Conv1D`, which stores the transpose."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach().t() if isinstance(layer, Conv1D) else weight.detach()


def bias_of(layer: nn.Module) -> torch.Tensor | None:
    bias = layer.bias
    assert bias is None or isinstance(bias, torch.Tensor)
    return None if bias is None else bias.detach()


def layer_info(name: str, layer: nn.Module, shard: tuple[int, int], dtype: torch.dtype) -> LayerInfo:
    """Describe a shard of a layer (Symbiosis, section 3.3), with the digest of its values in `dtype`."""
    d_out, d_in = weight_of(layer).shape
    index, number = shard
    first, last = d_out * index // number, d_out * (index + 1) // number
    return LayerInfo(name, d_in, d_out, first, last, digest(layer, first, last, dtype))


def digest(layer: nn.Module, first: int, last: int, dtype: torch.dtype) -> bytes:
    """Hash of the bias and of a few rows of the weight. Weights that are not in memory hash to empty bytes.

    Not of all rows: that would read every page of a checkpoint that the client has only mapped, and keep it in memory.
    """
    weight, bias = weight_of(layer), bias_of(layer)
    if weight.is_meta:
        return b""
    rows = weight[first:last]
    middle = len(rows) // 2
    hashed = hashlib.sha256(f"{tuple(rows.shape)} {bias is not None}".encode())
    for sample in (rows[:_SAMPLED_ROWS], rows[middle : middle + _SAMPLED_ROWS], rows[-_SAMPLED_ROWS:]):
        hashed.update(_bytes(sample.to(dtype)))
    if bias is not None:
        hashed.update(_bytes(bias[first:last].to(dtype)))
    return hashed.digest()[:8]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def fingerprint(groups: Sequence[Group], dtype: str) -> str:
    """Identity of a base: names, shapes, shards, type and values of its layers."""
    hashed = hashlib.sha256(dtype.encode())
    for layer in (layer for group in groups for layer in group):
        hashed.update(f"{layer.name} {layer.d_in} {layer.d_out} {layer.first} {layer.last} ".encode() + layer.digest)
    return hashed.hexdigest()
