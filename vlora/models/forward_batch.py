"""A `Batch` as arrays for one forward pass, and its attention inputs. Built on the host with numpy."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F

import atmm
from vlora.models.attention import LayerTensors, PagedChunk, PagedDecodes, PrefillSpan, Queries
from vlora.models.gpu.attention import Chunk, GpuAttention, Put
from vlora.models.hf_model import VisualRows
from vlora.models.request_state import RequestState
from vlora.types import BatchItem, Mode

# Padding every decode row to the longest context costs memory traffic; one call per row costs dispatch time. On a CPU
# padding is faster while it adds less than a quarter.
_MOST_PADDING = 1.25


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One request in the packed batch: rows [start, stop) hold its tokens [first, last).

    context: base KV rows of its tokens [0, last). answers: whether the step produces a token or the answer in one pass.
    """

    state: RequestState
    adapter: str | None
    start: int
    stop: int
    first: int
    last: int
    context: np.ndarray
    answers: bool

    def read(self) -> np.ndarray:
        """Batch indices of its tokens with a final hidden state that is read, ascending."""
        if not self.state.request.in_one_pass:
            return np.arange(self.stop - self.answers, self.stop)  # the last token, or none
        first, stop = np.searchsorted(self.state.head_tokens, (self.first, self.last))
        return self.state.head_tokens[first:stop] - self.first + self.start


def lane_by_lane(items: Sequence[BatchItem], merged: str | None) -> list[BatchItem]:
    """Sort items so that the tokens of one adapter are adjacent and form one lane.

    Short lanes come before long ones, so that decode kernels read a narrow range of the batch. The merged adapter's
    tokens come last, so that all other tokens, which share the deLoRA lane, are adjacent too.
    """
    num_tokens: Counter[str | None] = Counter()
    for item in items:
        num_tokens[item.adapter] += item.num_tokens

    def place(item: BatchItem) -> tuple[bool, int, str]:
        return item.adapter is not None and item.adapter == merged, num_tokens[item.adapter], item.adapter or ""

    return sorted(items, key=place)


class ForwardBatch:
    """Packed arrays of one step, in the order of `items`.

    Attributes:
        head_rows: Rows with a token that the request's task head or embedding reads, or with its answer.
        text_index: The places of their last tokens in the batch, on the model's device.
        draws: On a GPU the `draw_table` of the text rows, if any of them is not greedy.
        logits: Of the text rows, float32 [n, vocab]; None before they are computed.
        inputs: The language model's inputs [T, hidden], with the features of images in their places.
        hidden: Its states [T, hidden], valid in rows that are read. A decode step as a graph has neither.
    """

    text_index: torch.Tensor
    inputs: torch.Tensor
    hidden: torch.Tensor
    draws: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __init__(
        self, states: Mapping[str, RequestState], items: Sequence[BatchItem], block_size: int, block_rows: int
    ) -> None:
        self.rows: list[Row] = []
        start = 0
        for item in items:
            state = states[item.request_id]
            last = item.start + item.num_tokens
            context = state.kv_rows(item.block_table, block_size, block_rows)[:last]
            row = Row(state, item.adapter, start, start + item.num_tokens, item.start, last, context, item.answers)
            self.rows.append(row)
            start = row.stop
        self.text = [row for row in self.rows if row.answers and not row.state.request.in_one_pass]
        headed = (row for row in self.rows if row.state.request.in_one_pass)
        self.head_rows = [row for row in headed if row.answers or len(row.read())]
        self.num_tokens = start
        self.token_ids = np.empty(start, dtype=np.int64)
        self.write_rows = np.empty(start, dtype=np.int64)
        for row in self.rows:
            self.token_ids[row.start : row.stop] = row.state.tokens[row.first : row.last]
            self.write_rows[row.start : row.stop] = row.context[row.first :]

    def read_rows(self) -> list[np.ndarray]:
        return [row.read() for row in self.rows]

    def positions(self, num_rows: int) -> np.ndarray:
        """Rotary positions, int64 [num_rows, T]."""
        out = np.empty((num_rows, self.num_tokens), dtype=np.int64)
        for row in self.rows:
            assert row.state.positions is not None
            out[:, row.start : row.stop] = row.state.positions.span(row.first, row.last)
        return out

    def visuals(self, put: Put) -> VisualRows | None:
        """The features of images and videos at this step's placeholders; None if there are none."""
        rows: list[np.ndarray] = []
        features: list[torch.Tensor] = []
        levels: list[tuple[torch.Tensor, ...]] = []
        for row in self.rows:
            visual = row.state.visual
            if visual is None or row.first >= len(visual.before) - 1:
                continue
            before = visual.before[row.first : row.last + 1]
            if before[0] == before[-1]:
                continue
            rows.append(row.start + np.flatnonzero(np.diff(before)))
            features.append(visual.features[before[0] : before[-1]])
            levels.append(tuple(level[before[0] : before[-1]] for level in visual.deepstack))
        if not features:
            return None
        joined = [torch.cat(level) for level in zip(*levels, strict=True)]
        return VisualRows(put(np.concatenate(rows)), torch.cat(features), joined)

    def lanes(self, mode: Mode, merged: str | None) -> list[atmm.Lane]:
        """The lanes of the batch: each row's own adapter and, in mixed mode, minus the merged adapter."""
        if mode is Mode.MERGED:
            return []
        lanes: list[atmm.Lane] = []
        for row in self.rows:
            if row.adapter is None or row.adapter == merged:
                continue
            if lanes and lanes[-1].key == row.adapter and lanes[-1].stop == row.start:
                lanes[-1] = lanes[-1]._replace(stop=row.stop)
            else:
                lanes.append(atmm.Lane(row.adapter, row.start, row.stop, 1.0))
        others = sum(row.stop - row.start for row in self.rows if row.adapter is None or row.adapter != merged)
        if mode is Mode.MIXED and merged is not None and others:
            lanes.append(atmm.Lane(merged, 0, others, -1.0))
        return lanes


def queries_of(
    packed: ForwardBatch, dtype: torch.dtype, gpu: GpuAttention, put: Put
) -> tuple[list[Queries], list[Queries], np.ndarray | None]:
    """Build the queries of a packed batch.

    Args:
        gpu: The kernels of the model's device.
        put: Copies indices to the device.

    Returns:
        The queries of all layers except the last, those of the last layer, and its rows that are read (None: all).
    """
    attending = [np.arange(row.start, row.stop) for row in packed.rows]
    queries = _queries(packed, attending, dtype, gpu, put)
    read = packed.read_rows()
    rows = np.concatenate(read)
    if len(rows) == packed.num_tokens:
        return queries, queries, None
    return queries, _queries(packed, read, dtype, gpu, put), rows


def _queries(
    packed: ForwardBatch, attending: Sequence[np.ndarray], dtype: torch.dtype, gpu: GpuAttention, put: Put
) -> list[Queries]:
    """attending: for each row, the batch indices of its tokens that attend."""
    chunks: list[tuple[Row, np.ndarray]] = []
    places: list[int] = []
    contexts: list[np.ndarray] = []
    for row, own in zip(packed.rows, attending, strict=True):
        if len(own) == 1:
            # A single token attends as in a decode step, over the cache, which already has its own key and value.
            place = int(own[0])
            places.append(place)
            contexts.append(row.context[: row.first + place - row.start + 1])
        elif len(own):
            chunks.append((row, own))
    queries: list[Queries] = []
    compiled = atmm.serves_attention(gpu.device, dtype)
    if chunks and gpu.prefills:
        own_chunks = [Chunk.of(own, row.first - row.start, row.context) for row, own in chunks]
        queries.append(gpu.lay_out_chunks(own_chunks, packed.write_rows, put))
    elif compiled:
        queries += [PagedChunk.of(own, row.first - row.start, row.context) for row, own in chunks]
    else:
        queries += (_span(row, own, gpu.device, put) for row, own in chunks)
    if places and gpu.decodes:
        queries.append(gpu.lay_out_decodes(places, contexts, put))
    elif places and compiled:
        queries.append(PagedDecodes.of(places, contexts))
    elif places:
        queries.append(GatheredDecodes.of(put(np.array(places)), contexts))
    return queries


def _span(row: Row, own: np.ndarray, device: torch.device, put: Put) -> PrefillSpan:
    """The span of one request's chunk, of which two or more tokens attend."""
    context = None if row.first == 0 else put(row.context)
    everything = len(own) == row.stop - row.start
    if everything and context is None:
        return PrefillSpan(row.start, row.stop, None, None, None)
    # Read before the step's copy, so it has a copy of its own.
    seen = torch.from_numpy(own - row.start + row.first).to(device)  # the last token of the context that each one sees
    mask = seen[:, None] >= torch.arange(row.last, device=device)
    queries = None if everything else put(own)
    return PrefillSpan(row.start, row.stop, context, queries, mask)


# Attention of decode tokens by torch, for devices without a kernel that reads the paged KV cache in place.
#
# The rows of the contexts are gathered. KV heads are never expanded: a decode query is reshaped to [batch, kv_heads,
# group, head_dim], so a group's query heads read their shared KV head as one small matrix.


@dataclasses.dataclass(frozen=True, slots=True)
class GatheredDecodes:
    """Single tokens that attend, with their contexts padded to one length or one after the other.

    places: their rows of the packed batch. rows: base rows of their contexts, padded [D * longest] or ragged [sum of
    lengths]. lengths: context lengths, or None if padded. mask: bool [D, 1, 1, longest], or None if all contexts are
    equally long.
    """

    places: torch.Tensor
    rows: torch.Tensor
    lengths: tuple[int, ...] | None = None
    mask: torch.Tensor | None = None

    @classmethod
    def of(cls, places: torch.Tensor, contexts: Sequence[np.ndarray]) -> GatheredDecodes:
        """The layout of tokens in rows `places` of the batch, at least one. contexts: base KV rows of each."""
        device = places.device
        lengths = [len(rows) for rows in contexts]
        longest = max(lengths)
        if device.type == "cpu" and len(lengths) * longest > _MOST_PADDING * sum(lengths):
            return cls(places, torch.from_numpy(np.concatenate(contexts)), tuple(lengths))
        # Padding repeats the request's own last row: a NaN in another request's KV would pass the mask (0 * NaN = NaN).
        padded = [np.pad(rows, (0, longest - len(rows)), mode="edge") for rows in contexts]
        mask = None
        if min(lengths) != longest:
            mask = (torch.arange(longest)[None] < torch.tensor(lengths)[:, None])[:, None, None].to(device)
        return cls(places, torch.from_numpy(np.concatenate(padded)).to(device), mask=mask)

    def attend(self, layer: LayerTensors) -> None:
        out, q, _, cache, scale = layer
        _, num_heads, head_dim = q.shape
        shape = (cache[0].shape[1] // head_dim, head_dim)
        own = q.index_select(0, self.places).reshape(-1, shape[0], num_heads // shape[0], head_dim)
        k, v = (side.index_select(0, self.rows).view(-1, *shape) for side in cache)
        if self.lengths is None:
            attended = _attend(own, k, v, self.mask, scale)
        else:
            rows = zip(own.split(1), k.split(self.lengths), v.split(self.lengths), strict=True)
            attended = torch.cat([_attend(*row, None, scale) for row in rows])
        out.index_copy_(0, self.places, attended.reshape(-1, num_heads, head_dim))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """q [D, kv_heads, group, head_dim]; k and v [D * length, kv_heads, head_dim]."""
    k, v = (side.view(len(q), -1, *side.shape[1:]).transpose(1, 2) for side in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
