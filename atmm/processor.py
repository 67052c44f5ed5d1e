"""What the CPU at hand can do that torch does not tell."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

_THIN = 128  # rows


@functools.cache
def flags() -> frozenset[str]:
    """The processor's features as Linux names them; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether torch's own bfloat16 products are fast here: where oneDNN has kernels for the processor. Elsewhere they
    reach a tenth of the speed of float32 (docs/decisions.md, 2026-11-23)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def prefers_weight_left(num_rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether so many rows are multiplied faster as `weight x^T` than as `x weight^T`; the result then lies transposed.

    So it is for thin bfloat16 batches where the processor has matrix tiles, in 0.7 of the time. Without tiles the same
    takes up to 1.9 times as long (docs/decisions.md, 2026-11-22).
    """
    return num_rows <= _THIN and dtype is torch.bfloat16 and device.type == "cpu" and "amx_bf16" in flags()
