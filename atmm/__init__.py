"""ATMM, the adaptive-tiling matmul of V-LoRA (section 4.3): add many adapters' deltas to a packed batch, or merge one.

Build a `SegmentPlan` once per step and call `add_delta` after every adapted linear layer. The package works on tensors
only; it does not depend on requests or models.
"""

from atmm.cpu import library as load_kernels
from atmm.cpu.attention import attend, serves_attention
from atmm.cpu.norm import rms_norm, serves_norm
from atmm.flash_attention import flash, serves_flash
from atmm.layers import Factors, HeadRows, Site, SiteGroup
from atmm.matmul import thin_batches
from atmm.operator import add_delta, add_deltas, head_logits, merge
from atmm.segments import Lane, SegmentPlan
from atmm.strategies.hybrid import gains_from_copies, longest_short_lane
from atmm.strategies.registry import STRATEGIES
from atmm.tuning.matmul_choice import measure as measure_products
from atmm.tuning.tables import describe as describe_table
from atmm.warmup import compile_ahead

__all__ = [
    "STRATEGIES",
    "Factors",
    "HeadRows",
    "Lane",
    "SegmentPlan",
    "Site",
    "SiteGroup",
    "add_delta",
    "add_deltas",
    "attend",
    "compile_ahead",
    "describe_table",
    "flash",
    "gains_from_copies",
    "head_logits",
    "load_kernels",
    "longest_short_lane",
    "measure_products",
    "merge",
    "rms_norm",
    "serves_attention",
    "serves_flash",
    "serves_norm",
    "thin_batches",
]
