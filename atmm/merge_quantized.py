"""Merging into quantized weights: the exact sum is quantized again, in the weights' own format."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from atmm.fp8 import Fp8
from atmm.operator import merge
from atmm.quantized import QuantizedWeight


def merge_quantized(
    out: QuantizedWeight, base: QuantizedWeight, parts: Iterable[tuple[slice, slice, Tensor, Tensor]]
) -> None:
    """Write `base + delta` into `out` for n layers, both [n, o, i]. The sums are computed in float32.

    On a GPU one launch merges a delta of one block into eight-bit floats; other merges restore one layer at a time.

    Args:
        out: The result, with scales of its own. May be `base`.
        parts: The delta as blocks: the outputs and inputs of a block, its a [n, r, inputs] and bt [n, r, outputs].
    """
    blocks = list(parts)
    if len(blocks) == 1 and out.device.type == "cuda" and isinstance(out.format, Fp8):
        *_, a, bt = blocks[0]
        # Tiles of float32 factors would spill registers.
        if (a.shape[2], bt.shape[2]) == (out.shape[2], out.shape[1]) and a.dtype.itemsize == 2:
            from atmm.triton.merging import merge_rows  # importing Triton is slow

            merge_rows(out.values, out.scales, base.values, base.scales, a, bt, out.format.largest)
            return
    for layer in range(len(base)):  # one at a time: a layer in float32 takes four times the bytes of all its values
        sums = base[layer : layer + 1].float()
        for outputs, inputs, a, bt in blocks:
            place = sums[:, outputs, inputs]
            merge(place, place, a[layer : layer + 1].float(), bt[layer : layer + 1].float())
        out[layer].copy_(sums[0])
