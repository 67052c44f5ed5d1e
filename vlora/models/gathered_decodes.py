"""Attention of decode tokens by torch, for devices without a kernel that reads the paged KV cache in place.

The rows of the contexts are gathered. KV heads are never expanded: a decode query is reshaped to [batch, kv_heads,
group, head_dim], so a group's query heads read their shared KV head as one small matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from vlora.models.attention import LayerTensors

# Padding every decode row to the longest context costs memory traffic; one call per row costs dispatch time. On a CPU
# padding is faster while it adds less than a quarter.
_MOST_PADDING = 1.25


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
