"""The dtype of training computations."""

from __future__ import annotations

import torch


def mixed_precision(device: torch.device, wanted: bool = True) -> torch.autocast:
    """A context in which torch computes in bfloat16 where it does so safely.

    It has no effect on a processor without bfloat16 instructions, where emulated products take ten times as long as in
    float32.

    Args:
        device: training device.
        wanted: whether bfloat16 is allowed.
    """
    fast = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted and fast)
