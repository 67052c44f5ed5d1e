"""The dtype of training computations."""

from __future__ import annotations

import torch

from atmm.processor import multiplies_bfloat16


def mixed_precision(device: torch.device, wanted: bool = True) -> torch.autocast:
    """A context in which torch computes in bfloat16 where that is faster than float32.

    It has no effect on a processor without bfloat16 instructions, nor on Intel cores without matrix tiles, where
    products take ten times and twice as long as in float32.

    Args:
        wanted: whether bfloat16 is allowed.
    """
    fast = device.type != "cpu" or multiplies_bfloat16()
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted and fast)
