"""A trainable head over image tokens, which reads the features of the pictures instead of hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from heads import HeadSpec, TaskHead

HIDDEN_UNITS = 128


class ImageHead(nn.Module):
    """Two layers over the language model's inputs at image tokens; computes what `TaskHead.logits` computes.

    in_features: size of the inputs.
    """

    def __init__(self, in_features: int, hidden_units: int, num_outputs: int, device: torch.device) -> None:
        super().__init__()
        self.in_features = in_features
        self.hidden = nn.Linear(in_features, hidden_units, device=device)
        self.output = nn.Linear(hidden_units, num_outputs, device=device)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        for layer, deviation in ((self.hidden, self.in_features**-0.5), (self.output, 0.02)):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * deviation)
            layer.bias.zero_()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.output(F.gelu(self.hidden(F.rms_norm(rows.float(), rows.shape[-1:]))))
        return states


def stored_head(spec: HeadSpec, head: nn.Linear | ImageHead) -> TaskHead:
    layers = (head.output, head.hidden) if isinstance(head, ImageHead) else (head,)
    (weight, bias), *hidden = ((each.weight.detach().float(), each.bias.detach().float()) for each in layers)
    return TaskHead(spec, weight, bias, hidden[0] if hidden else None)


def trainable_head(head: TaskHead, device: torch.device) -> nn.Linear | ImageHead:
    outputs, inputs = head.weight.shape
    if head.hidden is None:
        module: nn.Linear | ImageHead = nn.Linear(inputs, outputs, device=device)
        named = {"weight": head.weight, "bias": head.bias}
    else:
        module = ImageHead(head.spec.hidden_size, inputs, outputs, device)
        weight, bias = head.hidden
        named = {"hidden.weight": weight, "hidden.bias": bias, "output.weight": head.weight, "output.bias": head.bias}
    module.load_state_dict(named)
    return module
