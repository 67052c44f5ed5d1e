"""Changes of a layer's outputs that are no low-rank delta: DoRA's scales, and biases.

DoRA (arXiv:2402.09353) trains a scale of each output beside the delta. PEFT computes `y = g (W0 x + s B A x) + b` with
`g = m / |W0 + s B A|` per output: m is trained, the norm is that of the weight's row, and the bias b is not scaled. The
relative change `g - 1` is computed once, when the adapter is read (`vlora.lora.layer_reading`). It is stored in the
model's dtype below the rows of bt, so that it is loaded, moved and evicted with the factors. In 16 bits a g near 1
would lose most of the change.

Lanes have the unscaled factors. The scale of the merged adapter is undone before the lanes are added, and the scale of
a token's own adapter is applied after that, so that any two adapters are exact beside each other in mixed mode.

Biases of adapters (PEFT's `bias` and `lora_bias`) are one more row, which is added at the end. Such an adapter is never
merged, since the bias of a layer is not part of its weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

import atmm
from vlora.parallel.adapter_sharding import FactorShape

SMALLEST_SCALE = 0.25
"""An adapter with a smaller |g| in the language model is never merged: undoing it divides rounding errors by g."""

_ROWS = 1024  # rows of a weight that are computed in float32 at a time, to limit temporary memory


class OutputChange(NamedTuple):
    """An adapter's change of one layer's outputs: their scale `g - 1` and what is added to them, both [d_out]."""

    scale: Tensor | None = None
    shift: Tensor | None = None

    @classmethod
    def split(cls, shape: FactorShape, a: Tensor, bt: Tensor) -> tuple[tuple[Tensor, Tensor], OutputChange]:
        """The factors without the further rows, and the change that these rows describe."""
        return (a, bt[: shape.rank]), cls(**dict(zip(shape.rows, bt[shape.rank :], strict=True)))


def apply_changes(y: Tensor, changes: Mapping[str, OutputChange], bias: Tensor | None, plan: atmm.SegmentPlan) -> None:
    """Change outputs as their own adapter does, in place.

    Args:
        y: Outputs with all deltas, [T, d_out].
        changes: By adapter; others have none.
        bias: The layer's bias [d_out], which is not scaled, or None.
        plan: The lanes of the T rows.
    """
    for lane in plan.lanes:
        if lane.sign > 0 and lane.key in changes:
            rows, (scale, shift) = y[lane.start : lane.stop], changes[lane.key]
            if scale is not None:
                _rescale(rows, scale, bias)
            if shift is not None:
                rows.add_(shift)


def undo_changes(y: Tensor, changes: Mapping[str, OutputChange], bias: Tensor | None, plan: atmm.SegmentPlan) -> None:
    """Undo the merged adapter's change of outputs before any delta is added. The arguments are those of
    `apply_changes`."""
    for lane in plan.lanes:
        if lane.sign < 0 and lane.key in changes:
            merged = changes[lane.key]
            assert merged.scale is not None and merged.shift is None, "an adapter with a bias is never merged"
            scale = merged.scale.float()
            _rescale(y[lane.start : lane.stop], (scale / -(1 + scale)).to(y.dtype), bias)


def _rescale(y: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    y.addcmul_(y if bias is None else y - bias, scale)


def merge_rescaled(out: Tensor, base: Tensor, a: Tensor, bt: Tensor) -> None:
    """Write `g (base + delta)`, rounded once, into `out`.

    Args:
        out: [layers, d_out, d_in].
        base: W0, the same shape.
        a: [layers, r, d_in].
        bt: [layers, r + 1, d_out], the last row is `g - 1`.
    """
    for to, weight, own_a, own_bt in zip(out, base, a.float(), bt.float(), strict=True):
        for start in range(0, len(weight), _ROWS):
            rows = slice(start, start + _ROWS)
            merged = torch.addmm(weight[rows].float(), own_bt[:-1, rows].t(), own_a)
            to[rows] = merged.mul_(1 + own_bt[-1, rows, None])


def row_norms(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The norm of each row of `weight + b a` [d_out] in float32.

    Args:
        weight: [d_out, d_in].
        a: [r, d_in] in float32.
        b: [d_out, r] in float32, with the scaling.
    """
    parts = zip(weight.split(_ROWS), b.split(_ROWS), strict=True)
    return torch.cat([torch.linalg.vector_norm(torch.addmm(rows.float(), own, a), dim=1) for rows, own in parts])
