"""Draws of all rows at once on a GPU. No row needs a sort over the vocabulary, or a value on the host.

The distribution and the order of tokens are those of `vlora.models.sampling`, so the same seeds give the same tokens
as on the host, up to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlora.types import SamplingParams

_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _UNIFORM = range(5)


def draw_table(params: Sequence[SamplingParams], uniforms: Sequence[float]) -> np.ndarray:
    """The parameters that `draw` needs on the device, float64 [5, n]: those of each row, and its number in [0, 1)."""
    rows = [
        (own.temperature, own.top_k, own.top_p, own.min_p, number) for own, number in zip(params, uniforms, strict=True)
    ]
    return np.ascontiguousarray(np.array(rows, dtype=np.float64).T)


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], table: torch.Tensor) -> torch.Tensor:
    """Choose one token per row: int64 [n] on the device.

    Args:
        logits: float32 [n, vocab].
        params: Sampling parameters of each row. They determine only which filters are computed.
        table: `draw_table` of the same parameters, on the device.
    """
    sampled = table[_TEMPERATURE] > 0
    temperature = torch.where(sampled, table[_TEMPERATURE], 1.0)[:, None]
    values = logits.double()
    masses = ((values - values.amax(-1, keepdim=True)) / temperature).exp()  # finite for any temperature
    num_tokens = logits.shape[1]
    counts = [min(own.top_k or num_tokens, num_tokens) for own in params if own.temperature > 0]
    filtered_by_mass = any(own.top_p < 1 for own in params if own.temperature > 0)
    order = _order(logits) if filtered_by_mass or min(counts) < num_tokens else None
    if order is not None and min(counts) < num_tokens:
        most = torch.where(table[_TOP_K] > 0, table[_TOP_K], num_tokens).clamp(max=num_tokens)[:, None]
        masses = torch.where(_first(order, torch.ones_like(masses), most), masses, 0.0)
    if order is not None and filtered_by_mass:
        top_p = table[_TOP_P][:, None]
        kept = _first(order, masses, top_p * masses.sum(-1, keepdim=True))
        masses = torch.where(kept | (top_p >= 1), masses, 0.0)
    if any(own.min_p for own in params if own.temperature > 0):
        masses = torch.where(masses >= table[_MIN_P][:, None], masses, 0.0)  # the largest is 1
    cumulative = masses.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    places = torch.searchsorted(cumulative, table[_UNIFORM][:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # the product may round to the total
    tokens = torch.minimum(places, last)[:, 0].clamp(max=num_tokens - 1)  # NaN logits give any token
    return torch.where(sampled, tokens, logits.argmax(-1))


def _order(logits: torch.Tensor) -> torch.Tensor:
    """Integers in the order of float32 logits, int32 [n, vocab]: the bits, with those of negative numbers reversed."""
    bits = (logits + 0.0).view(torch.int32)  # adding zero makes both zeros equal
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _first(order: torch.Tensor, weights: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """The tokens that are preceded by less than `limit`, bool [n, vocab].

    A token is preceded by the sum of the weights of larger tokens, and of equal ones with smaller ids. Equal tokens
    have equal weights. The smallest such token is found by bisection over the bits of `order`.

    Args:
        order: int32 [n, vocab].
        weights: float64 [n, vocab].
        limit: float64 [n, 1], above 0.
    """
    border = torch.full_like(limit, -(2**31), dtype=torch.int64)
    for bit in range(31, -1, -1):
        higher = border + (1 << bit)
        reached = torch.where(order >= higher, weights, 0.0).sum(-1, keepdim=True) >= limit
        border = torch.where(reached, higher, border)
    before = torch.where(order > border, weights, 0.0).sum(-1, keepdim=True)
    equal = order == border
    return (order > border) | (equal & (before + (equal.cumsum(-1) - 1) * weights < limit))
