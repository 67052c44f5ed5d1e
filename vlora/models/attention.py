"""Attention over the paged KV cache, for one packed batch of prefill chunks and decode tokens.

Every token that attends belongs to one of the step's layouts, which compute their tokens' results. On a CPU compiled
kernels read the cache in place; where there are none, a prefill chunk is one call of torch, and decode tokens use
`vlora.models.gathered_decodes`. `vlora.models.gpu.attention` has the layouts of a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

import atmm


class KVCache:
    """Per-layer views of the arena's KV matrix.

    `k[layer]` and `v[layer]`: [rows, kv_heads * head_dim], indexed by base rows.
    """

    def __init__(self, matrix: torch.Tensor, num_layers: int, block_size: int) -> None:
        self.k = [matrix[(2 * layer) * block_size :] for layer in range(num_layers)]
        self.v = [matrix[(2 * layer + 1) * block_size :] for layer in range(num_layers)]


class LayerTensors(NamedTuple):
    """Inputs and output of the attention of one layer, for a packed batch of T tokens.

    out: results [T, heads, head_dim], contiguous. q: [T, heads, head_dim]. new: keys and values of the batch's tokens,
    [T, kv_heads * head_dim] each. cache: keys and values of the layer, to which `new` was already written. scale:
    factor of the scores.
    """

    out: torch.Tensor
    q: torch.Tensor
    new: tuple[torch.Tensor, torch.Tensor]
    cache: tuple[torch.Tensor, torch.Tensor]
    scale: float


class Queries(Protocol):
    """Tokens of a packed batch that attend, in a layout for one kernel that is the same in all layers."""

    def attend(self, layer: LayerTensors) -> None:
        """Write the tokens' results into their rows of `layer.out`.

        Rows of tokens that do not attend may become undefined.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class StepAttention:
    """Attention inputs of one step, built once and shared by all layers.

    write_rows: base row of every token [T]. queries: for all layers except the last. last_queries: for the last layer;
    the same sequence if all of its rows are read.
    """

    cache: KVCache
    write_rows: torch.Tensor
    queries: Sequence[Queries]
    last_queries: Sequence[Queries]

    def attend(
        self, layer: int, q: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor], scale: float | None
    ) -> torch.Tensor:
        """The attention of a layer, whose keys and values were written: [T, heads, head_dim], contiguous.

        Rows of tokens that do not attend in this layer are undefined. The arguments are those of `LayerTensors`.
        """
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        cache = self.cache.k[layer], self.cache.v[layer]
        self.launch(layer, LayerTensors(out, q, new, cache, q.shape[2] ** -0.5 if scale is None else scale))
        return out

    def launch(self, layer: int, tensors: LayerTensors) -> None:
        for queries in self.last_queries if layer == len(self.cache.k) - 1 else self.queries:
            queries.attend(tensors)


def token_rows(states: torch.Tensor) -> torch.Tensor:
    """Keys or values [1, heads, T, head_dim] as [T, heads * head_dim], with a last stride of 1."""
    rows = states.transpose(1, 2).reshape(states.shape[2], -1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    vlora_step: StepAttention | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface. query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim].

    Rows of tokens that do not attend in this layer are undefined in the result.
    """
    assert vlora_step is not None, "this model runs inside the engine only: its attention needs a StepAttention"
    layer: int = module.layer_idx  # type: ignore[assignment]
    new = token_rows(key), token_rows(value)
    atmm.write_kv(vlora_step.cache.k[layer], vlora_step.cache.v[layer], *new, vlora_step.write_rows)
    return vlora_step.attend(layer, query[0].transpose(0, 1), new, scaling)[None], None


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Tokens [start, stop) of the packed batch, which belong to one request's prompt, by torch's attention.

    rows: base rows of its whole context [context], or None if the chunk is the whole context (nothing to gather).
    queries: batch indices of its tokens that attend [n], or None if all do. mask: bool [n, context], True where a token
    attends; None for plain causal attention of all tokens over the chunk itself.
    """

    start: int
    stop: int
    rows: torch.Tensor | None
    queries: torch.Tensor | None
    mask: torch.Tensor | None

    def attend(self, layer: LayerTensors) -> None:
        out, q, new, cache, scale = layer
        if self.rows is None:
            k, v = (side[self.start : self.stop] for side in new)
        else:
            k, v = (side.index_select(0, self.rows) for side in cache)
        own = q[self.start : self.stop] if self.queries is None else q.index_select(0, self.queries)
        head_dim = q.shape[2]
        attended = F.scaled_dot_product_attention(
            own.transpose(0, 1)[None],
            k.view(1, len(k), -1, head_dim).transpose(1, 2),
            v.view(1, len(v), -1, head_dim).transpose(1, 2),
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=scale,
            enable_gqa=q.shape[1] * head_dim != k.shape[1],
        )[0].transpose(0, 1)
        if self.queries is None:
            out[self.start : self.stop] = attended
        else:
            out.index_copy_(0, self.queries, attended)


@dataclasses.dataclass(frozen=True, slots=True)
class PagedChunk:
    """Tokens of one request's prompt for the compiled kernel. `atmm.attend_chunk` describes the fields."""

    places: torch.Tensor
    rows: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def of(cls, places: np.ndarray, offset: int, context: np.ndarray) -> PagedChunk:
        """places: batch indices of its tokens that attend; `offset` more, and they are indices of the context."""
        return cls(*(torch.from_numpy(indices) for indices in (places, context, places + (offset + 1))))

    def attend(self, layer: LayerTensors) -> None:
        atmm.attend_chunk(layer.out, layer.q, *layer.cache, self.places, self.rows, self.seen, layer.scale)


@dataclasses.dataclass(frozen=True, slots=True)
class PagedDecodes:
    """Decode tokens for the compiled kernel, which reads the cache in place. `atmm.attend` describes the fields."""

    places: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, places: Sequence[int], contexts: Sequence[np.ndarray]) -> PagedDecodes:
        """The layout of tokens in rows `places` of the batch. contexts: base KV rows of their contexts."""
        starts = [0, *itertools.accumulate(map(len, contexts))]
        return cls(torch.tensor(places), torch.from_numpy(np.concatenate(contexts)), torch.tensor(starts))

    def with_room(self) -> PagedDecodes:
        """A copy that can `hold` twice the rows."""
        return PagedDecodes(self.places.clone(), self.rows.repeat(2), self.starts.clone())

    def hold(self, other: PagedDecodes) -> bool:
        """Become other queries, at the same addresses. Returns whether they fit."""
        fits = len(self.places) == len(other.places) and len(self.rows) >= len(other.rows)
        if fits:
            self.places.copy_(other.places)
            self.rows[: len(other.rows)] = other.rows
            self.starts.copy_(other.starts)
        return fits

    def attend(self, layer: LayerTensors) -> None:
        atmm.attend(layer.out, layer.q, *layer.cache, self.places, self.rows, self.starts, layer.scale)
