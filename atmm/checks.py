"""Argument checks of the operations. They run before anything is computed and name the invalid argument.

All checks raise ValueError. `atmm.layers` checks the factors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atmm.layers import HeadRows, Packed, Site
from atmm.segments import SegmentPlan
from atmm.tuning.buckets import DTYPES


def check_tokens(y: Tensor, x: Tensor, site: Site, d_out: int, plan: SegmentPlan, packed: Packed | None) -> None:
    """Check the inputs and outputs of add-delta. d_out: outputs of the site, or of its whole group."""
    if x.shape != (plan.num_tokens, site.d_in):
        raise ValueError(
            f"x is {tuple(x.shape)}; {site.name} with a plan of {plan.num_tokens} tokens expects "
            f"[{plan.num_tokens}, {site.d_in}]"
        )
    if y.shape != (plan.num_tokens, d_out):
        raise ValueError(
            f"y is {tuple(y.shape)}; {site.name} with a plan of {plan.num_tokens} tokens expects "
            f"[{plan.num_tokens}, {d_out}]"
        )
    _check_places("y", y)
    dtype, device = x.dtype, x.device
    if y.dtype is not dtype or y.device != device:
        raise ValueError(f"y is {y.dtype} on {y.device} and x {dtype} on {device}; give one dtype on one device")
    _check_dtype("x", dtype)
    if packed is not None and (packed.layout.dtype is not dtype or packed.layout.device != device):
        raise ValueError(
            f"{site.name}: x is {dtype} on {device}, its packed adapters {packed.layout.dtype} on "
            f"{packed.layout.device}; load adapters in the model's dtype, on its device"
        )


def _check_places(name: str, written: Tensor) -> None:
    strides = written.stride()
    if 0 in strides and any(size > 1 and not step for size, step in zip(written.shape, strides, strict=True)):
        raise ValueError(f"{name} has strides {strides}, so elements overlap in memory; give a tensor without overlap")


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"{name} is {dtype}; deltas are computed in {', '.join(map(str, DTYPES))}")


def check_merge(out: Tensor, base: Tensor, a: Tensor, bt: Tensor) -> None:
    n, o, i = base.shape if base.dim() == 3 else (None, None, None)
    rank = a.shape[1] if a.dim() == 3 else None
    if n is None or out.shape != base.shape or a.shape != (n, rank, i) or bt.shape != (n, rank, o):
        raise ValueError(
            f"merge of a {tuple(a.shape)} and bt {tuple(bt.shape)} into base {tuple(base.shape)}, out "
            f"{tuple(out.shape)}; give a [n, r, i], bt [n, r, o], base and out [n, o, i]"
        )
    if not out.dtype == base.dtype == a.dtype == bt.dtype:
        raise ValueError(
            f"merge of a {a.dtype} and bt {bt.dtype} into base {base.dtype}, out {out.dtype}; give one dtype"
        )
    if not out.device == base.device == a.device == bt.device:
        raise ValueError(
            f"merge of a on {a.device} and bt on {bt.device} into base on {base.device}, out on {out.device}; give "
            "one device"
        )
    _check_dtype("base", base.dtype)
    _check_places("out", out)


def check_heads(h: Tensor, rows: Sequence[HeadRows]) -> None:
    if h.dim() != 2:
        raise ValueError(f"h is {tuple(h.shape)}; give hidden states [T, hidden]")
    for place, (weight, bias, index) in enumerate((head.weight, head.bias, head.index) for head in rows):
        if weight.dim() != 2 or weight.shape[1] != h.shape[1] or weight.device != h.device:
            raise ValueError(
                f"rows[{place}].weight is {tuple(weight.shape)} on {weight.device}; h has {h.shape[1]} features on "
                f"{h.device}, give [c, {h.shape[1]}] on that device"
            )
        if bias is not None and (bias.shape, bias.dtype, bias.device) != (weight.shape[:1], weight.dtype, h.device):
            raise ValueError(
                f"rows[{place}].bias is {tuple(bias.shape)} in {bias.dtype} on {bias.device}; give [{len(weight)}] in "
                f"{weight.dtype} on {h.device}"
            )
        if index.dim() != 1 or index.dtype != torch.int64 or index.device != h.device:
            raise ValueError(
                f"rows[{place}].index is {tuple(index.shape)} in {index.dtype} on {index.device}; give one dimension "
                f"of int64 on {h.device}"
            )
        # On a GPU this check would synchronize with the stream.
        if index.device.type == "cpu" and len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(h):
            raise ValueError(
                f"rows[{place}].index ranges from {int(index.min())} to {int(index.max())}; h has rows 0 to "
                f"{len(h) - 1}"
            )
