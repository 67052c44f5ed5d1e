"""Changes of a layer's outputs and inputs that are no low-rank delta: DoRA's scales, biases, and IA3.

DoRA (arXiv:2402.09353) trains a scale of each output beside the delta. PEFT computes `y = g (W0 x + s B A x) + b` with
`g = m / |W0 + s B A|` per output: m is trained, the norm is that of the weight's row, and the bias b is not scaled. The
relative change `g - 1` is computed once, when the adapter is read (`vlora.lora.layer_reading`). It is stored in the
model's dtype below the rows of bt, so that it is loaded, moved and evicted with the factors. In 16 bits a g near 1
would lose most of the change.

Lanes have the unscaled factors. The scale of the merged adapter is undone before the lanes are added, and the scale of
a token's own adapter is applied after that, so that any two adapters are exact beside each other in mixed mode.

Biases of adapters (PEFT's `bias` and `lora_bias`) are one more row, which is added at the end. Such an adapter is never
merged, since the bias of a layer is not part of its weight. IA3 (arXiv:2205.05638) multiplies all outputs, with their
bias, or all inputs of a layer by a trained vector l. It has no factors, and is never merged either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

import atmm
from atmm.quantized import StoredWeight
from vlora.parallel.adapter_sharding import FactorShape

SMALLEST_SCALE = 0.25
"""An adapter with a smaller |g| in the language model is never merged: undoing it divides rounding errors by g."""

_ROWS = 1024  # rows of a weight that are computed in float32 at a time, to limit temporary memory


class OutputChange(NamedTuple):
    """An adapter's change of one layer, beside its factors: a row of each kind, see `FactorShape`."""

    scale: Tensor | None = None
    shift: Tensor | None = None
    gain: Tensor | None = None
    input: Tensor | None = None

    @classmethod
    def split(cls, shape: FactorShape, a: Tensor, bt: Tensor) -> tuple[tuple[Tensor, Tensor], OutputChange]:
        """The factors without the further rows, and the change that these rows describe."""
        rows: dict[str, Tensor] = dict(zip(shape.output_rows, bt[shape.rank :], strict=True))
        if "input" in shape.rows:
            a, rows["input"] = a[: shape.rank], a[shape.rank]
        return (a, bt[: shape.rank]), cls(**rows)


def apply_changes(y: Tensor, changes: Mapping[str, OutputChange], bias: Tensor | None, plan: atmm.SegmentPlan) -> None:
    """Change outputs as their own adapter does, in place.

    Args:
        y: Outputs with all deltas, [T, d_out].
        bias: The layer's bias [d_out], which is not scaled, or None.
    """
    for lane in plan.lanes:
        if lane.sign > 0 and lane.key in changes:
            rows, own = y[lane.start : lane.stop], changes[lane.key]
            if own.scale is not None:
                _rescale(rows, own.scale, bias)
            if own.shift is not None:
                rows.add_(own.shift)
            if own.gain is not None:
                _rescale(rows, own.gain, None)


def undo_changes(y: Tensor, changes: Mapping[str, OutputChange], bias: Tensor | None, plan: atmm.SegmentPlan) -> None:
    """Undo the merged adapter's change of outputs before any delta is added. The arguments are those of
    `apply_changes`."""
    for lane in plan.lanes:
        if lane.sign < 0 and lane.key in changes:
            merged = changes[lane.key].scale
            assert merged is not None, "only scales are merged"
            scale = merged.float()
            _rescale(y[lane.start : lane.stop], (scale / -(1 + scale)).to(y.dtype), bias)


def changed_inputs(x: Tensor, changes: Mapping[str, OutputChange], plan: atmm.SegmentPlan) -> Tensor:
    """Inputs x [..., d_in] of T rows as their own adapters change them: x itself if none of the plan's does."""
    lanes = [lane for lane in plan.lanes if lane.sign > 0 and lane.key in changes]
    rows = [(lane, change) for lane in lanes if (change := changes[lane.key].input) is not None]
    if not rows:
        return x
    out = x.clone()
    for lane, change in rows:
        _rescale(out.view(-1, x.shape[-1])[lane.start : lane.stop], change, None)
    return out


def _rescale(y: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    y.addcmul_(y if bias is None else y - bias, scale)


def merge_rescaled(out: StoredWeight, base: StoredWeight, a: Tensor, bt: Tensor) -> None:
    """Write `g (base + delta)`, rounded once, into `out`.

    Args:
        out: [layers, d_out, d_in]. Quantized weights are rounded with scales of their own.
        base: W0, the same shape.
        a: [layers, r, d_in].
        bt: [layers, r + 1, d_out], the last row is `g - 1`.
    """
    for layer, (own_a, own_bt) in enumerate(zip(a.float(), bt.float(), strict=True)):
        to, weight = out[layer], base[layer]
        for start in range(0, len(weight), _ROWS):
            rows = slice(start, start + _ROWS)
            merged = torch.addmm(weight[rows].float(), own_bt[:-1, rows].t(), own_a)
            to[rows].copy_(merged.mul_(1 + own_bt[-1, rows, None]))


def row_norms(weight: StoredWeight, a: Tensor, b: Tensor) -> Tensor:
    """The norm of each row of `weight + b a` [d_out] in float32.

    Args:
        weight: [d_out, d_in], which may be quantized.
        a: [r, d_in] in float32.
        b: [d_out, r] in float32, with the scaling.
    """
    parts = [slice(start, start + _ROWS) for start in range(0, len(weight), _ROWS)]
    sums = (torch.addmm(weight[rows].float(), b[rows], a) for rows in parts)
    return torch.cat([torch.linalg.vector_norm(each, dim=1) for each in sums])
