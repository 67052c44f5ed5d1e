"""What the CPU at hand can do that torch does not tell."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

_THIN = 128  # rows


@functools.cache
def flags() -> frozenset[str]:
    """The processor's features as Linux names them; none elsewhere."""
    return frozenset(_cpuinfo("flags").split())


def _vendor() -> str:
    """The processor's vendor as Linux names it, "GenuineIntel" for one; empty elsewhere."""
    return _cpuinfo("vendor_id")


def _cpuinfo(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    line = next((line for line in lines if line.startswith(field)), "")
    return line.partition(":")[2].strip()


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether bfloat16 products are faster than float32 products on this processor.

    Without bfloat16 instructions they reach a tenth of the speed of float32 (docs/decisions.md, 2026-11-23), and on
    Intel's cores without matrix tiles half of it (2026-11-24).
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return "amx_bf16" in flags() or _vendor() != "GenuineIntel"


def prefers_weight_left(num_rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether so many rows are multiplied faster as `weight x^T` than as `x weight^T`; the result then lies transposed.

    So it is for thin bfloat16 batches where the processor has matrix tiles, in 0.7 of the time. Without tiles the same
    takes up to 1.9 times as long (docs/decisions.md, 2026-11-22).
    """
    return num_rows <= _THIN and dtype is torch.bfloat16 and device.type == "cpu" and "amx_bf16" in flags()
