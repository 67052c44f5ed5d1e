"""Attention over the paged KV cache, for one packed batch of prefill chunks and decode tokens.

Prefill uses torch: gather the context rows, then scaled-dot-product attention. Decode tokens on a CPU use a compiled
kernel that reads the cache in place. Its torch fallback gathers the rows and never expands KV heads: a decode query is
reshaped to [batch, kv_heads, group, head_dim], so a group's query heads read their shared KV head as one small matrix.
`vlora.models.gpu.attention` has the kernels of a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import torch.nn.functional as F

import atmm
from atmm.processor import multiplies_bfloat16
from vlora.models.gpu.attention import BlockDecodes, FlashChunks

# Padding every decode row to the longest context costs memory traffic; one call per row costs dispatch time. On a CPU
# padding is faster while it adds less than a quarter.
_MOST_PADDING = 1.25


class KVCache:
    """Per-layer views of the arena's KV matrix.

    `k[layer]` and `v[layer]`: [rows, kv_heads * head_dim], indexed by base rows.
    """

    def __init__(self, matrix: torch.Tensor, num_layers: int, block_size: int) -> None:
        self.k = [matrix[(2 * layer) * block_size :] for layer in range(num_layers)]
        self.v = [matrix[(2 * layer + 1) * block_size :] for layer in range(num_layers)]


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Tokens [start, stop) of the packed batch, which belong to one request's prompt.

    rows: base rows of its whole context [context], or None if the chunk is the whole context (nothing to gather).
    queries: batch indices of its tokens that attend [n], or None if all do. mask: bool [n, context], True where a token
    attends; None for plain causal attention of all tokens over the chunk itself.
    """

    start: int
    stop: int
    rows: torch.Tensor | None
    queries: torch.Tensor | None
    mask: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeRows:
    """The packed rows that are single decode tokens.

    index: their batch indices [D], or None if the whole batch decodes. rows: base rows of their contexts, padded
    [D * longest] or ragged [sum of lengths]. lengths: context lengths, or None if padded.
    mask: bool [D, 1, 1, longest], or None if all contexts are equally long.
    """

    index: torch.Tensor | None
    rows: torch.Tensor
    lengths: tuple[int, ...] | None = None
    mask: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PagedRows:
    """Decode tokens for the compiled kernel, which reads the cache in place. `atmm.attend` describes the fields."""

    places: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor

    def attend(
        self, out: torch.Tensor, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], scale: float
    ) -> None:
        atmm.attend(out, q, *cache, self.places, self.rows, self.starts, scale)


@dataclasses.dataclass(frozen=True, slots=True)
class Queries:
    """The tokens of a packed batch that attend."""

    prefills: tuple[PrefillSpan, ...] | FlashChunks
    decodes: DecodeRows | PagedRows | BlockDecodes | None

    @property
    def writes_rows(self) -> bool:
        """Whether results are written into rows of a shared output tensor."""
        return bool(self.prefills) or not isinstance(self.decodes, DecodeRows) or self.decodes.index is not None


@dataclasses.dataclass(frozen=True, slots=True)
class StepAttention:
    """Attention inputs of one step, built once and shared by all layers.

    write_rows: base row of every token [T]. queries: for all layers except the last. last_queries: for the last layer,
    of which fewer rows may be read.
    """

    cache: KVCache
    write_rows: torch.Tensor
    queries: Queries
    last_queries: Queries


def decode_rows(
    index: torch.Tensor | None, contexts: list[torch.Tensor], device: torch.device, dtype: torch.dtype
) -> DecodeRows | PagedRows:
    """Lay out the decode contexts (each [length], on the host).

    The layout is for the compiled kernel if it supports the type, else padded or ragged by cost.
    """
    lengths = [len(rows) for rows in contexts]
    if atmm.serves_attention(device, dtype):
        places = torch.arange(len(contexts)) if index is None else index
        starts = torch.tensor([0, *itertools.accumulate(lengths)])
        return PagedRows(places, torch.cat(contexts), starts)
    longest = max(lengths)
    if device.type == "cpu" and len(lengths) * longest > _MOST_PADDING * sum(lengths):
        return DecodeRows(index, torch.cat(contexts).to(device), tuple(lengths))
    padded = torch.empty(len(lengths), longest, dtype=torch.int64)
    for i, rows in enumerate(contexts):
        padded[i, : lengths[i]] = rows
        # Padding repeats the request's own last row: a NaN in another request's KV would pass the mask (0 * NaN = NaN).
        padded[i, lengths[i] :] = rows[-1]
    mask = None
    if min(lengths) != longest:
        mask = (torch.arange(longest)[None] < torch.tensor(lengths)[:, None])[:, None, None].to(device)
    return DecodeRows(index, padded.view(-1).to(device), mask=mask)


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
    step = vlora_step
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries = step.last_queries if layer == len(step.cache.k) - 1 else step.queries
    q = query[0]
    if q.stride(-1) != 1 and (queries.prefills or isinstance(queries.decodes, DecodeRows)):
        # Thin products return transposed results, and a query with a strided head dimension misses torch's fast path.
        q = q.contiguous()
    num_heads, num_tokens, head_dim = q.shape
    num_kv_heads = key.shape[1]
    k_new = key[0].transpose(0, 1).reshape(num_tokens, -1)
    v_new = value[0].transpose(0, 1).reshape(num_tokens, -1)
    k_cache, v_cache = step.cache.k[layer], step.cache.v[layer]
    atmm.write_kv(k_cache, v_cache, k_new, v_new, step.write_rows)

    out: torch.Tensor | None = None
    if queries.writes_rows:
        out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    dtype = _prefill_dtype(q)
    scale = head_dim**-0.5 if scaling is None else scaling
    spans = queries.prefills
    if isinstance(spans, FlashChunks):
        assert out is not None
        spans.attend(out, q.transpose(0, 1), (k_new, v_new), (k_cache, v_cache), scale)
        spans = ()
    for span in spans:
        assert out is not None
        if span.rows is None:
            k, v = k_new[span.start : span.stop], v_new[span.start : span.stop]
        else:
            k, v = k_cache.index_select(0, span.rows), v_cache.index_select(0, span.rows)
        attended = F.scaled_dot_product_attention(
            (q[:, span.start : span.stop] if span.queries is None else q.index_select(1, span.queries))[None].to(dtype),
            k.view(1, -1, num_kv_heads, head_dim).transpose(1, 2).to(dtype),
            v.view(1, -1, num_kv_heads, head_dim).transpose(1, 2).to(dtype),
            attn_mask=span.mask,
            is_causal=span.mask is None,
            scale=scaling,
            enable_gqa=num_heads != num_kv_heads,
        )
        if span.queries is None:
            out[span.start : span.stop] = attended[0].transpose(0, 1)
        else:
            out.index_copy_(0, span.queries, attended[0].transpose(0, 1).to(out.dtype))
    decodes = queries.decodes
    if isinstance(decodes, PagedRows | BlockDecodes):
        assert out is not None
        decodes.attend(out, q.transpose(0, 1), (k_cache, v_cache), scale)
    elif decodes is not None:
        q_rows = q.transpose(0, 1) if decodes.index is None else q.transpose(0, 1).index_select(0, decodes.index)
        attended = _decode(q_rows, decodes, k_cache, v_cache, num_kv_heads, scaling)
        if decodes.index is None:
            out = attended
        else:
            assert out is not None
            out.index_copy_(0, decodes.index, attended)
    return out[None], None  # type: ignore[index]


def _prefill_dtype(query: torch.Tensor) -> torch.dtype:
    """The type in which a prompt's attention is fastest."""
    if query.dtype is torch.bfloat16 and query.device.type == "cpu" and not multiplies_bfloat16():
        return torch.float32
    return query.dtype


def _decode(
    q: torch.Tensor,
    decodes: DecodeRows,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_kv_heads: int,
    scaling: float | None,
) -> torch.Tensor:
    """q [D, heads, head_dim] -> [D, heads, head_dim]."""
    num_rows, num_heads, head_dim = q.shape
    q = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    k = k_cache.index_select(0, decodes.rows)
    v = v_cache.index_select(0, decodes.rows)
    if decodes.lengths is None:
        k = k.view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2)
        v = v.view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=decodes.mask, scale=scaling)
        return out.reshape(num_rows, num_heads, head_dim)
    rows = zip(q.split(1), k.split(decodes.lengths), v.split(decodes.lengths), strict=True)
    attended = [
        F.scaled_dot_product_attention(
            q_row,
            k_row.view(1, -1, num_kv_heads, head_dim).transpose(1, 2),
            v_row.view(1, -1, num_kv_heads, head_dim).transpose(1, 2),
            scale=scaling,
        )
        for q_row, k_row, v_row in rows
    ]
    return torch.cat(attended).reshape(num_rows, num_heads, head_dim)
