"""Merging into quantized weights: the exact sum is quantized again, in the weights' own format."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from atmm.operator import merge
from atmm.quantized import QuantizedWeight


def merge_quantized(
    out: QuantizedWeight, base: QuantizedWeight, parts: Iterable[tuple[slice, slice, Tensor, Tensor]]
) -> None:
    """Write `base + delta` into `out` for n layers, both [n, o, i]. The sums are computed in float32.

    Args:
        out: The result, with scales of its own; not `base`.
        base: The weights.
        parts: The delta as blocks: the outputs and inputs of a block, its a [n, r, inputs] and bt [n, r, outputs].
    """
    blocks = list(parts)
    for layer in range(len(base)):  # one at a time: a layer in float32 takes four times the bytes of all its values
        sums = base[layer : layer + 1].float()
        for outputs, inputs, a, bt in blocks:
            place = sums[:, outputs, inputs]
            merge(place, place, a[layer : layer + 1].float(), bt[layer : layer + 1].float())
        out[layer].copy_(sums[0])
