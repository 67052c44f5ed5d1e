"""Attention of a step on a GPU: decode tokens over KV blocks in place, prefill chunks by torch's flash kernel.

Both take int32 arrays that are made once a step on the host, in one copy each, and serve all layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

import atmm
from vlora.models.attention import LayerTensors

if TYPE_CHECKING:
    from atmm.triton.attention import Scratch

# Rows of block tables are a multiple of this many entries, so that Triton compiles for one alignment of their stride.
TABLE_COLUMNS = 16


Put = Callable[[np.ndarray], torch.Tensor]
"""Copies an array to the model's device. On a GPU it has its values after `StepInputs.copy`."""


class Chunk(NamedTuple):
    """Adjacent rows [start, stop) of the packed batch that attend: a part of one request's prompt.

    context: base KV rows of the request's tokens up to the last one of the chunk, int64.
    """

    start: int
    stop: int
    context: np.ndarray

    @classmethod
    def of(cls, own: np.ndarray, offset: int, context: np.ndarray) -> Chunk:
        """The rows from the first to the last token that attends; those between are computed too, and not used.

        Args:
            own: The batch indices of the tokens that attend, ascending.
            offset: The index in its request of the token in row 0 of the batch, if the chunk reached back to it.
            context: Base KV rows of the request's tokens.
        """
        start, stop = int(own[0]), int(own[-1]) + 1
        return cls(start, stop, context[: stop + offset])


@dataclasses.dataclass(frozen=True, slots=True)
class FlashChunks:
    """All prefill chunks of a step, as sequences that cover the packed rows [start, stop) without gaps.

    Rows between two chunks, such as decode tokens, are a sequence of their own; its results are not used. Therefore no
    query is gathered. starts_q, starts_k, longest_q, longest_k: as in `atmm.flash`. rows: int32, base KV rows of all
    sequences' keys, one sequence after the other; None if no chunk has earlier tokens, so that no key is gathered.
    """

    start: int
    stop: int
    starts_q: torch.Tensor
    starts_k: torch.Tensor
    longest_q: int
    longest_k: int
    rows: torch.Tensor | None

    @classmethod
    def of(cls, chunks: Sequence[Chunk], write_rows: np.ndarray, put: Put) -> FlashChunks:
        """The layout of chunks, in the order of the batch. write_rows: base KV row of every token of the batch."""
        start, stop = chunks[0].start, chunks[-1].stop
        sequences: list[Chunk] = []
        for chunk in chunks:
            end = sequences[-1].stop if sequences else start
            if end < chunk.start:
                sequences.append(Chunk(end, chunk.start, write_rows[end : chunk.start]))
            sequences.append(chunk)
        num_q = [chunk.stop - chunk.start for chunk in sequences]
        num_k = [len(chunk.context) for chunk in sequences]
        starts = [np.cumsum([0, *counts], dtype=np.int32) for counts in (num_q, num_k)]
        gathered = [] if num_q == num_k else [chunk.context.astype(np.int32) for chunk in sequences]
        flat = put(np.concatenate([*starts, *gathered]))
        starts_q, starts_k, rows = flat.tensor_split([len(num_q) + 1, 2 * (len(num_q) + 1)])
        return cls(start, stop, starts_q, starts_k, max(num_q), max(num_k), rows if gathered else None)

    def attend(self, layer: LayerTensors) -> None:
        """See `vlora.models.attention.Queries`. Rows between the chunks become undefined."""
        out, q, new, cache, scale = layer
        head_dim = q.shape[2]
        if self.rows is None:
            keys, values = (side[self.start : self.stop] for side in new)
        else:
            keys, values = (side.index_select(0, self.rows) for side in cache)
        out[self.start : self.stop] = atmm.flash(
            q[self.start : self.stop],
            keys.view(len(keys), -1, head_dim),
            values.view(len(values), -1, head_dim),
            self.starts_q,
            self.starts_k,
            self.longest_q,
            self.longest_k,
            causal=True,
            scale=scale,
        )


@dataclasses.dataclass(slots=True)
class BlockDecodes:
    """Single tokens that attend over their contexts in KV blocks. `atmm.triton.attention.decode` describes the fields.

    scratch: made by the first layer of a step for all layers.
    """

    places: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    block_rows: int
    block_size: int
    scratch: Scratch | None = None

    def attend(self, layer: LayerTensors) -> None:
        out, q, _, cache, scale = layer
        from atmm.triton.attention import decode, make_scratch

        kv_rows, _ = cache  # the values of a block are behind its keys
        if q.stride(2) != 1:
            q = q.contiguous()
        if self.scratch is None:
            _, heads, head_dim = q.shape
            self.scratch = make_scratch(heads, kv_rows.shape[1] // head_dim, head_dim, q.device)
        decode(
            q,
            kv_rows,
            self.block_table,
            self.lengths,
            block_rows=self.block_rows,
            block_size=self.block_size,
            scale=scale,
            places=self.places,
            out=out,
            scratch=self.scratch,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class GpuAttention:
    """Lays out the attention of steps on one device, for the kernels that exist there.

    decodes, prefills: whether `lay_out_decodes` and `lay_out_chunks` may be used. block_rows: KV rows from the start of
    a block to the start of the next one.
    """

    device: torch.device
    block_size: int
    block_rows: int
    decodes: bool
    prefills: bool

    @classmethod
    def of(cls, hf_model: Any, block_size: int, block_rows: int) -> GpuAttention:
        """The kernels for a model, an `HFModel`, on its device."""
        device, dtype = hf_model.device, hf_model.dtype
        decodes = False
        if device.type == "cuda":
            from atmm.triton.attention import serves_decode

            group = hf_model.text_config.num_attention_heads // hf_model.text_config.num_key_value_heads
            decodes = serves_decode(dtype, group, hf_model.head_dim, block_size)
        return cls(device, block_size, block_rows, decodes, atmm.serves_flash(device, dtype, hf_model.head_dim))

    def lay_out_chunks(self, chunks: Sequence[Chunk], write_rows: np.ndarray, put: Put) -> FlashChunks:
        """The layout of prefill chunks, at least one, in the order of the batch. write_rows: KV rows of its tokens."""
        return FlashChunks.of(chunks, write_rows, put)

    def lay_out_decodes(self, places: Sequence[int], contexts: Sequence[np.ndarray], put: Put) -> BlockDecodes:
        """The layout of single tokens, at least one.

        Args:
            places: Their rows of the packed batch.
            contexts: Base KV rows of their contexts.
            put: Copies an array to the device.
        """
        num_rows = len(places)
        lengths = [len(rows) for rows in contexts]
        columns = -(-max(lengths) // (self.block_size * TABLE_COLUMNS)) * TABLE_COLUMNS
        flat = np.zeros((2 + columns) * num_rows, dtype=np.int32)
        flat[:num_rows], flat[num_rows : 2 * num_rows] = places, lengths
        table = flat[2 * num_rows :].reshape(num_rows, columns)
        for row, context in zip(table, contexts, strict=True):
            blocks = context[:: self.block_size] // self.block_rows
            row[: len(blocks)] = blocks
        on_device = put(flat)
        return BlockDecodes(
            on_device[:num_rows],
            on_device[num_rows : 2 * num_rows],
            on_device[2 * num_rows :].view(num_rows, columns),
            self.block_rows,
            self.block_size,
        )

    def _copy(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def compile_ahead(self, hf_model: Any, max_batch: int) -> None:
        """Launch every decode kernel that a step may need once. max_batch: the largest number of requests."""
        if not self.decodes:
            return
        from atmm.triton.attention import padded_batch

        kv_rows = torch.zeros(2 * self.block_size, hf_model.kv_dim, dtype=hf_model.dtype, device=self.device)
        num_heads = hf_model.text_model.layers[0].self_attn.q_proj.out_features // hf_model.head_dim
        for batch in sorted({min(padded_batch(batch), max_batch) for batch in range(1, max_batch + 1)}):
            tokens = self.lay_out_decodes(range(batch), [np.zeros(1, dtype=np.int64)] * batch, self._copy)
            q = torch.zeros(batch, num_heads, hf_model.head_dim, dtype=kv_rows.dtype, device=self.device)
            cache = kv_rows, kv_rows
            tokens.attend(LayerTensors(torch.empty_like(q), q, cache, cache, 1.0))
