"""The decoder layers of a served model as a training runs them: with lanes of trained adapters, and differentiable.

The serving engine runs the same modules between any two calls, so nothing of them stays changed: while a layer is
called, its linear layers and its attention are replaced, and the originals return afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

import atmm
from atmm.gradients import delta_gradients
from atmm.matmul import add_input_gradient, linear, widened
from vlora.lora.adapted_linear import AdaptedLinear
from vlora.training.adapter import TrainedFactors
from vlora.training.batch import PackedBatch

_ATTENTION = "vlora_packed_training"  # without "flash" and "sdpa", for which transformers tests


class TrainedLinear:
    """A linear layer with frozen weights, and the trained factors of adapters that target it.

    weight: W0 [d_out, d_in]. site: the factors that lanes read. trained: the parameters, by adapter.
    """

    def __init__(self, name: str, layer: AdaptedLinear, weight: torch.Tensor) -> None:
        self.module = layer
        self.weight = weight
        self.bias = None if layer.bias is None else layer.bias.detach()
        self.site = atmm.Site(name, layer.in_features, layer.out_features)
        self.trained: dict[str, tuple[TrainedFactors, float]] = {}

    def attach(self, key: str, factors: TrainedFactors, scale: float) -> None:
        self.trained[key] = factors, scale
        self.site.factors[key] = factors.read

    def detach(self, key: str) -> None:
        self.trained.pop(key, None)
        self.site.factors.pop(key, None)

    def output(self, x: torch.Tensor, plan: atmm.SegmentPlan) -> torch.Tensor:
        """`x W0^T + b` with the deltas of the plan's lanes; x [..., d_in] of the plan's tokens."""
        keys = [key for key in self.trained if key in plan.keys]
        leaves = [leaf for key in keys for leaf in self.trained[key][0][:2]]
        y: torch.Tensor = _Product.apply(x, self, plan, keys, *leaves)  # type: ignore[no-untyped-call]
        return y


class _Product(torch.autograd.Function):
    """Keeps the input where a lane needs it for the gradient of its A; the frozen part needs the weights only."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layer: TrainedLinear, plan: atmm.SegmentPlan, keys: list[str], *leaves: torch.Tensor
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = linear(rows, layer.weight, layer.bias)
        if keys:
            y = y if y.stride(1) == 1 else y.contiguous()
            atmm.add_delta(y, rows, layer.site, plan)
            ctx.save_for_backward(rows)
        ctx.layer, ctx.plan, ctx.keys, ctx.shape = layer, plan, keys, x.shape
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: TrainedLinear = ctx.layer
        g = gradient.reshape(-1, gradient.shape[-1])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = g.new_empty(len(g), layer.weight.shape[1])
            add_input_gradient(dx, g, layer.weight, beta=0)
        found: list[torch.Tensor | None] = []
        if ctx.keys:
            (rows,) = ctx.saved_tensors
            made = delta_gradients(dx, g.contiguous(), rows, layer.site, ctx.plan)
            for key in ctx.keys:
                (a, bt, _), scale = layer.trained[key]
                found += [made[key].a.to(a.dtype), made[key].bt.to(bt.dtype).mul_(scale)]
        return (None if dx is None else dx.view(ctx.shape), None, None, None, *found)


class TrainedDecoderLayer:
    """One decoder layer of the model. num_weights: of its linear layers."""

    def __init__(self, module: torch.nn.Module, config: Any, index: int, linears: Mapping[str, TrainedLinear]) -> None:
        AttentionInterface.register(_ATTENTION, packed_attention)
        self._module = module
        self._config = config
        self._index = index
        self._linears = tuple(linears.values())
        self.num_weights = sum(layer.weight.numel() for layer in self._linears)

    def trains(self, batch: PackedBatch) -> bool:
        return any(key in batch.plan.keys for layer in self._linears for key in layer.trained)

    def __call__(
        self, hidden: torch.Tensor, batch: PackedBatch, rotations: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Hidden states [T, hidden] after the layer."""
        with self._replaced(batch):
            out = self._module(
                hidden[None],
                attention_mask=None,
                position_ids=None,
                past_key_values=None,
                use_cache=False,
                position_embeddings=rotations,
                packed_batch=batch,
            )
        return batch.add_deepstack(out[0], self._index)

    @contextmanager
    def _replaced(self, batch: PackedBatch) -> Iterator[None]:
        # Attributes of the modules take precedence over the methods of their classes.
        before = self._config._attn_implementation  # noqa: SLF001  (transformers)
        try:
            for layer in self._linears:
                layer.module.__dict__["forward"] = functools.partial(layer.output, plan=batch.plan)
            self._config._attn_implementation = _ATTENTION  # noqa: SLF001
            yield
        finally:
            self._config._attn_implementation = before  # noqa: SLF001
            for layer in self._linears:
                layer.module.__dict__.pop("forward", None)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed_batch: PackedBatch | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each sample by itself: transformers' attention interface.

    Plain products, because the fused attention is slower on a CPU, in its backward pass (docs/decisions/0012).

    Args:
        query: [1, heads, T, head_dim].
        key: [1, kv_heads, T, head_dim], as value.

    Returns:
        [1, T, heads, head_dim].
    """
    assert packed_batch is not None, "training calls the decoder layers with their batch"
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
    scale = head_dim**-0.5 if scaling is None else scaling
    dtype = query.dtype
    query, key, value = widened(query, key, value)
    results = []
    for start, stop in packed_batch.spans:
        n = stop - start
        # The heads that read one key are rows of one product.
        q = query[0, :, start:stop].reshape(kv_heads, heads // kv_heads * n, head_dim)
        k, v = key[0, :, start:stop], value[0, :, start:stop]
        scores = torch.matmul(q, k.transpose(1, 2)).mul(scale).view(heads, n, n)
        scores = scores.masked_fill(packed_batch.masks[n], -torch.inf)
        shares = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        attended = torch.matmul(shares.view(kv_heads, -1, n), v).view(heads, n, head_dim)
        results.append(attended.transpose(0, 1))
    return (results[0] if len(results) == 1 else torch.cat(results))[None].to(dtype), None
