"""The base executor: the weights of the frozen linear layers, and products with them.

It is stateless. A call is a pure function of rows, layers and direction: the gradient of a frozen layer's input needs
the weights only, so nothing of a forward pass is stored for its backward pass (Symbiosis, section 3.6).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from atmm.matmul import add_input_gradient, choose, linear
from vlora.errors import BadConfig
from vlora.split.frames import DTYPES, Direction, Group
from vlora.split.layers import bias_of, fingerprint, groups_of, layer_info, weight_of


class _Weights(NamedTuple):
    weight: torch.Tensor  # [outputs of this shard, inputs]
    bias: torch.Tensor | None


class BaseExecutor:
    """The layers of one model, or of one shard of it. Keeps no reference to the model.

    Attributes:
        instance: Random bytes that identify this executor among others of the same base.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        *,
        name: str = "",
        shard: tuple[int, int] = (0, 1),
        device: torch.device | None = None,
    ) -> None:
        """Take frozen layers.

        Args:
            layers: By name, in the model's order, as `frozen_layers`. Their weights are referenced, not copied.
            name: The model's name, for clients' messages.
            shard: Index and number of the executors that share the outputs of every layer.
            device: Where the products are computed; None leaves the weights where they are.

        Raises:
            BadConfig: There are no layers, more than one type of them, or one that is not supported.
        """
        if not layers:
            raise BadConfig(f"model {name!r} has no linear layers that a base executor could hold")
        dtypes = sorted({str(weight_of(layer).dtype).removeprefix("torch.") for layer in layers.values()})
        if len(dtypes) > 1 or dtypes[0] not in DTYPES:
            raise BadConfig(
                f"the linear layers of {name!r} have the types {', '.join(dtypes)}; a base executor needs one of "
                f"{', '.join(DTYPES)}: set --dtype, or use a checkpoint that is not quantized"
            )
        self.name = name
        self.shard = shard
        self.dtype: torch.dtype = getattr(torch, dtypes[0])
        self.groups: list[Group] = []
        self._weights: list[list[_Weights]] = []
        for names in groups_of(layers):
            group = tuple(layer_info(each, layers[each], shard, self.dtype) for each in names)
            self.groups.append(group)
            self._weights.append(
                [_shard(layers[info.name], info.first, info.last, device) for info in group],
            )
        self.device = self._weights[0][0].weight.device
        self.fingerprint = fingerprint(self.groups, dtypes[0])
        self.instance = secrets.token_bytes(16)
        self.busy_s = 0.0

    @property
    def num_layers(self) -> int:
        return sum(map(len, self.groups))

    @property
    def num_bytes(self) -> int:
        return sum(
            each.weight.nbytes + (0 if each.bias is None else each.bias.nbytes)
            for group in self._weights
            for each in group
        )

    @torch.inference_mode()
    def compute(
        self,
        direction: int,
        group: int,
        mask: int,
        inputs: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None = None,
    ) -> Sequence[torch.Tensor]:
        """Multiply rows with the weights of the selected layers.

        Args:
            inputs: One tensor [rows, d_in], or for BACKWARD one gradient [rows, outputs] for each selected layer.

        Returns:
            For each selected layer [rows, outputs], or for BACKWARD one gradient [rows, d_in].
        """
        began = time.perf_counter()
        layers = [layer for index, layer in enumerate(self._weights[group]) if mask >> index & 1]
        inputs = [each.to(self.device) for each in inputs]
        on_device = out if out is not None and out[0].device == self.device else None
        made: Sequence[torch.Tensor]
        if direction == Direction.BACKWARD:
            made = on_device or [inputs[0].new_empty(len(inputs[0]), layers[0].weight.shape[1])]
            for number, (dy, layer) in enumerate(zip(inputs, layers, strict=True)):
                add_input_gradient(made[0], dy, layer.weight, beta=int(number > 0))
        else:
            (x,) = inputs
            made = on_device or [x.new_empty(len(x), len(layer.weight)) for layer in layers]
            for y, layer in zip(made, layers, strict=True):
                _multiply(x, layer.weight, None if direction == Direction.WITHOUT_BIAS else layer.bias, y)
        if out is not None and on_device is None:
            for place, each in zip(out, made, strict=True):
                place.copy_(each)
            made = out
        self.busy_s += time.perf_counter() - began
        return made


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    """y = x W^T + b. Few rows use the compiled kernels, which read the weights once for all of them."""
    if choose(len(x), weight) != "library":
        y.copy_(linear(x, weight, bias))
    elif bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)


def _shard(layer: nn.Module, first: int, last: int, device: torch.device | None) -> _Weights:
    """A shard of a layer: views of the whole layer's weights if there is one shard, copies otherwise."""
    weight, bias = weight_of(layer), bias_of(layer)
    if last - first < len(weight):
        weight = weight[first:last].clone()  # so that the other shards' rows are freed
        bias = None if bias is None else bias[first:last].clone()
    return _Weights(weight.to(device), None if bias is None else bias.to(device))
