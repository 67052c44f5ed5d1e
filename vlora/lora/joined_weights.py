"""Layers that read one input, computed by one product on a GPU: their weights are adjacent in the slabs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from atmm.matmul import linear
from atmm.quantized import HeldWeight, StoredWeight


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
