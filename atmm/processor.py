"""Capabilities of this CPU that torch does not report."""

from __future__ import annotations

import functools
from pathlib import Path

import torch


@functools.cache
def flags() -> frozenset[str]:
    """The processor's feature flags by their Linux names; empty on other systems."""
    return frozenset(_cpuinfo("flags").split())


def vendor() -> str:
    """The processor's vendor by its Linux name, for example "GenuineIntel"; empty on other systems."""
    return _cpuinfo("vendor_id")


def _cpuinfo(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo; empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    line = next((line for line in lines if line.startswith(field)), "")
    return line.partition(":")[2].strip()


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether bfloat16 products are faster than float32 products on this CPU.

    Without bfloat16 instructions they reach a tenth of the speed of float32 (docs/decisions/0040), and on Intel cores
    without matrix tiles half of it.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001
        return False
    # The compiled kernels check the vendor themselves, in `multiplies_pairs_fast` of `cpu/products.cpp`.
    return "amx_bf16" in flags() or vendor() != "GenuineIntel"


def prefers_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch multiplies tensors of this type more slowly than the same tensors converted to float32."""
    return dtype is torch.bfloat16 and device.type == "cpu" and not multiplies_bfloat16()


def prefers_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN multiplies this type faster than torch's own product, which adds a bias in a pass of its own."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return multiplies_bfloat16()
    return dtype is torch.float32 and "avx512f" in flags() and vendor() == "AuthenticAMD"
