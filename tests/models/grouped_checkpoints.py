"""Checkpoints as GPTQ, AWQ and compressed-tensors write them, made value by value as the formats describe them."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atmm.formats import FORMATS
from tests.engine.test_quantized_answers import language_linears
from tests.families import build_model
from tests.hub.vocabularies import PUBLISHED

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each of the eight values of an int32, lowest bits first."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a checkpoint is written. group: -1 for whole rows. version: of GPTQ. fp8, int8: of compressed-tensors."""

    method: Literal["gptq", "awq", "packed", "fp8", "int8"]
    bits: int = 8
    group: int = -1
    symmetric: bool = False
    version: Literal["gptq", "gptq_v2"] = "gptq"

    def __str__(self) -> str:
        version = f"-{self.version}" if self.method == "gptq" else ""
        return f"{self.method}{self.bits}-{self.group}-{'sym' if self.symmetric else 'asym'}{version}"

    @property
    def settings(self) -> dict[str, Any]:
        """The `quantization_config`, as published but for its sizes."""
        names = {"packed": "w4a16", "int8": "w8a8"}
        found: dict[str, Any] = copy.deepcopy(PUBLISHED["quantization"][names.get(self.method, self.method)])
        if self.method in ("gptq", "awq"):
            found |= {"bits": self.bits, "group_size": self.group}
            return {**found, "sym": self.symmetric, "checkpoint_format": self.version} if "sym" in found else found
        if self.method == "packed":
            weights = found["config_groups"]["group_0"]["weights"]
            weights |= {"num_bits": self.bits, "symmetric": self.symmetric}
            if self.group == -1:
                weights |= {"strategy": "channel", "group_size": None}
            else:
                weights["group_size"] = self.group
        return {**found, "ignore": ["re:visual.*", "lm_head"]}


def packed(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Values [n, m] as int32 [n, m * bits / 32]: value `order[k]` of each int32 has its k-th lowest bits."""
    per = 32 // bits
    out = []
    for row in values.tolist():
        words = []
        for first in range(0, len(row), per):
            word = 0
            for k, place in enumerate(order or range(per)):
                word |= row[first + place] << (bits * k)
            words.append(word - 2**32 if word >= 2**31 else word)
        out.append(words)
    return torch.tensor(out, dtype=torch.int32)


def stored_layer(layout: Layout, d_out: int, d_in: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer with random values, and its weight in float32, computed one group at a time."""
    generator = torch.Generator().manual_seed(seed)
    if layout.method in ("fp8", "int8"):
        kind = FORMATS[layout.method]
        held, scales = kind.encode(torch.randn(d_out, d_in, generator=generator) * 0.6 / d_in**0.5)
        scales = (scales * 1.05).bfloat16()  # not the scale that rounding would choose
        return {"weight": held, "weight_scale": scales}, kind.decode(held, scales.float())
    group = d_in if layout.group == -1 else layout.group
    num_groups, highest = d_in // group, 2**layout.bits - 1
    values = torch.randint(0, highest + 1, (d_out, d_in), generator=generator)
    scales = (torch.rand(d_out, num_groups, generator=generator) * 0.4 / highest + 0.01 / highest).half()
    zeros = torch.randint(1, highest + 1, (d_out, num_groups), generator=generator)
    if layout.symmetric:
        zeros[:] = 2 ** (layout.bits - 1)
    weight = torch.empty(d_out, d_in)
    for g in range(num_groups):
        inputs = slice(g * group, (g + 1) * group)
        weight[:, inputs] = scales[:, g : g + 1].float() * (values[:, inputs] - zeros[:, g : g + 1])
    bits = layout.bits
    if layout.method == "gptq":
        stored_zeros = zeros - (1 if layout.version == "gptq" else 0)
        return {
            "qweight": packed(values, bits).t().contiguous(),
            "qzeros": packed(stored_zeros.t(), bits),
            "scales": scales.t().contiguous(),
            "g_idx": torch.arange(d_in, dtype=torch.int32) // group,
        }, weight
    if layout.method == "awq":
        return {
            "qweight": packed(values.t(), bits, AWQ_OUTPUTS),
            "qzeros": packed(zeros.t(), bits, AWQ_OUTPUTS),
            "scales": scales.t().contiguous(),
        }, weight
    tensors = {
        "weight_packed": packed(values, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([d_out, d_in]),
    }
    if not layout.symmetric:
        tensors["weight_zero_point"] = packed(zeros.t(), bits).t().contiguous()
    return tensors, weight


class Stored:
    """A checkpoint in a folder, and a model with its restored weights."""

    def __init__(self, family: str, layout: Layout, folder: Path) -> None:
        self.family, self.layout, self.folder = family, layout, folder
        self.model = build_model(family)
        self.model.save_pretrained(folder)
        self.file = folder / "model.safetensors"
        tensors = load_file(self.file)
        for seed, (name, linear) in enumerate(language_linears(self.model).items()):
            own, weight = stored_layer(layout, linear.out_features, linear.in_features, seed)
            linear.weight.data = weight
            tail = name[name.index("layers.") :]
            key = next(key for key in tensors if key.endswith(f"{tail}.weight") and "vis" not in key)
            del tensors[key]
            tensors |= {f"{key.removesuffix('weight')}{suffix}": tensor for suffix, tensor in own.items()}
        save_file(tensors, self.file, metadata={"format": "pt"})
        self.set(quantization_config=layout.settings)

    def set(self, **fields: Any) -> None:
        set_config(self.folder, **fields)

    def rewrite(self, change: Callable[[dict[str, Tensor]], None]) -> None:
        tensors = load_file(self.file)
        change(tensors)
        save_file(tensors, self.file, metadata={"format": "pt"})


def set_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
