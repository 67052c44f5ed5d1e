"""A packed batch over a paged KV cache with random content, for the attention of one model layer by itself.

The batch is built as the runner builds it, from requests with block tables, and runs through the attention function
that is registered with transformers. Whatever that function uses for a device is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vlora.memory.arena import PAGE_BYTES, block_pages
from vlora.models.attention import KVCache, StepAttention, paged_attention
from vlora.models.forward_batch import ForwardBatch, queries_of
from vlora.models.request_state import RequestState
from vlora.types import BatchItem, Request

BLOCK_SIZE = 16


class Heads(NamedTuple):
    """Of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Chunk(NamedTuple):
    """One request's share of the batch: `num_tokens` tokens after a context of `start` tokens."""

    start: int
    num_tokens: int


class PagedBatch:
    """Requests of the given lengths, with their blocks in random order.

    Args:
        chunks: One per request.
        heads: Shape of the layers.
        num_layers: Layers that share the batch; each has its own KV.
        dtype: Of queries and KV.
        device: Location.
    """

    def __init__(
        self, chunks: Sequence[Chunk], heads: Heads, num_layers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.chunks, self.heads, self.num_layers = chunks, heads, num_layers
        kv_dim = heads.num_kv_heads * heads.head_dim
        pages = block_pages(num_layers, BLOCK_SIZE, kv_dim, dtype)
        self._block_rows = pages * PAGE_BYTES // (kv_dim * dtype.itemsize)
        counts = [-(-(chunk.start + chunk.num_tokens) // BLOCK_SIZE) for chunk in chunks]
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(sum(counts), generator=generator).tolist()
        tables: list[tuple[int, ...]] = []
        for count in counts:
            tables.append(tuple(order[:count]))
            del order[:count]
        self.matrix = torch.randn(sum(counts) * self._block_rows, kv_dim, dtype=dtype, device=device)
        states = {}
        items = []
        for index, (chunk, table) in enumerate(zip(chunks, tables, strict=True)):
            stop = chunk.start + chunk.num_tokens
            request = Request(request_id=f"r{index}", prompt_ids=(3,) * stop)
            states[request.request_id] = RequestState(request, None, {})
            items.append(BatchItem(request.request_id, None, chunk.start, chunk.num_tokens, table, True))
        packed = ForwardBatch(states, items, BLOCK_SIZE, self._block_rows)
        self.contexts = [torch.from_numpy(row.context).to(device) for row in packed.rows]
        # The last layer computes fewer queries, so all layers here use the queries of the others.
        queries, _, _ = queries_of(packed, [], device, dtype)
        cache = KVCache(self.matrix, num_layers, BLOCK_SIZE)
        self.step = StepAttention(cache, torch.from_numpy(packed.write_rows).to(device), queries, queries)
        shapes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        self.q, self.k, self.v = (
            torch.randn(1, number, packed.num_tokens, heads.head_dim, dtype=dtype, device=device) for number in shapes
        )
        self._modules: list[Any] = [SimpleNamespace(layer_idx=layer) for layer in range(num_layers)]

    def attend(self, layer: int = 0) -> Tensor:
        """Write the batch's KV and attend. Returns [tokens, heads, head_dim]."""
        out, _ = paged_attention(self._modules[layer], self.q, self.k, self.v, None, vlora_step=self.step)
        return out[0]

    def attend_all(self) -> None:
        """All layers, one after the other."""
        for layer in range(self.num_layers):
            self.attend(layer)

    @property
    def kv_bytes(self) -> int:
        """KV of one layer that the batch reads."""
        tokens = sum(chunk.start + chunk.num_tokens for chunk in self.chunks)
        return 2 * tokens * self.heads.num_kv_heads * self.heads.head_dim * self.q.element_size()

    def context_of(self, index: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """K and V of one request's whole context after `attend`, [context, kv_heads, head_dim], gathered."""
        rows = self.contexts[index]
        cache = self.step.cache
        k, v = cache.k[layer].index_select(0, rows), cache.v[layer].index_select(0, rows)
        shape = (-1, self.heads.num_kv_heads, self.heads.head_dim)
        return k.view(shape), v.view(shape)

    def exact(self, index: int, layer: int = 0) -> Tensor:
        """The result of one request's tokens in float64, [tokens, heads, head_dim], after `attend`."""
        chunk = self.chunks[index]
        first = sum(each.num_tokens for each in self.chunks[:index])
        q = self.q[0, :, first : first + chunk.num_tokens].double()
        k, v = (each.double().transpose(0, 1) for each in self.context_of(index, layer))
        group = self.heads.num_heads // self.heads.num_kv_heads
        seen = torch.arange(chunk.start + chunk.num_tokens, device=q.device)
        limit = chunk.start + torch.arange(chunk.num_tokens, device=q.device)
        mask = seen[None] > limit[:, None]
        out = []
        for head in range(self.heads.num_heads):
            scores = q[head] @ k[head // group].T * self.heads.head_dim**-0.5
            out.append(scores.masked_fill(mask, float("-inf")).softmax(-1) @ v[head // group])
        return torch.stack(out, 1)
