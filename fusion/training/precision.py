"""The number type that training computes in."""

from __future__ import annotations

import torch


def mixed_precision(device: torch.device, wanted: bool = True) -> torch.autocast:
    """A context in which torch computes in bfloat16 where it does so safely.

    It changes nothing on a processor without bfloat16 instructions: products in an emulated type take ten times as long
    as in float32 there.

    Args:
        device: what training runs on.
        wanted: whether bfloat16 is allowed at all.
    """
    fast = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted and fast)
