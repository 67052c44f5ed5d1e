"""Attention inputs of a packed batch: for all layers except the last, and for the last, where fewer rows are read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import atmm
from vlora.models.attention import PrefillSpan, Queries, decode_rows
from vlora.models.forward_batch import ForwardBatch, Row
from vlora.models.last_layer import ReadRows, lanes_of_rows


def queries_of(
    packed: ForwardBatch, lanes: Sequence[atmm.Lane], device: torch.device, dtype: torch.dtype
) -> tuple[Queries, Queries, ReadRows | None]:
    """Build the queries of a packed batch.

    Args:
        packed: The batch.
        lanes: The batch's lanes.
        device: The model's device.
        dtype: The KV cache's type.

    Returns:
        The queries of all layers except the last, those of the last layer, and the rows of the last layer that are read
        (None: all).
    """
    attending = [np.arange(row.start, row.stop) for row in packed.rows]
    queries = _queries(packed.rows, attending, packed.num_tokens, device, dtype)
    read = packed.read_rows()
    rows = np.concatenate(read)
    if len(rows) == packed.num_tokens:
        return queries, queries, None
    limited = ReadRows(torch.from_numpy(rows).to(device), lanes_of_rows(lanes, rows))
    return queries, _queries(packed.rows, read, packed.num_tokens, device, dtype), limited


def _queries(
    rows: Sequence[Row],
    attending: Sequence[np.ndarray],
    num_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Queries:
    """attending: for each row, the batch indices of its tokens that attend."""
    spans: list[PrefillSpan] = []
    places: list[int] = []
    contexts: list[torch.Tensor] = []
    for row, own in zip(rows, attending, strict=True):
        if len(own) == 1:
            # A single token attends as in a decode step, over the cache, which already has its own key and value.
            place = int(own[0])
            places.append(place)
            contexts.append(torch.from_numpy(row.context[: row.first + place - row.start + 1]))
        elif len(own):
            spans.append(_span(row, own, device))
    if not places:
        return Queries(tuple(spans), None)
    index = None if len(places) == num_tokens else torch.tensor(places).to(device)
    return Queries(tuple(spans), decode_rows(index, contexts, device, dtype))


def _span(row: Row, own: np.ndarray, device: torch.device) -> PrefillSpan:
    """The span of one request's chunk, of which two or more tokens attend."""
    context = None if row.first == 0 else torch.from_numpy(row.context).to(device)
    everything = len(own) == row.stop - row.start
    if everything and context is None:
        return PrefillSpan(row.start, row.stop, None, None, None)
    seen = own - row.start + row.first  # the last token of the context that each token sees
    mask = torch.from_numpy(seen[:, None] >= np.arange(row.last)[None]).to(device)
    queries = None if everything else torch.from_numpy(own).to(device)
    return PrefillSpan(row.start, row.stop, context, queries, mask)
