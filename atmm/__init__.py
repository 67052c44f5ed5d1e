"""ATMM, the adaptive-tiling matmul of V-LoRA (section 4.3): add many adapters' deltas to a packed batch, or merge one.

Build a `SegmentPlan` once per step and call `add_delta` after every adapted linear layer. The package works on tensors
only; it does not depend on requests or models.
"""

from atmm.cpu import Tape
from atmm.cpu import library as load_kernels
from atmm.cpu.attention import attend, attend_all, attend_chunk, attends_faster, serves_attention
from atmm.flash_attention import flash, serves_flash
from atmm.layers import Factors, HeadRows, Site, SiteGroup
from atmm.matmul import thin_batches
from atmm.operator import add_delta, add_deltas, begin_deltas, head_logits, merge, merge_quantized
from atmm.places import FactorTable
from atmm.pointwise import (
    add_rms_norm,
    gate_product,
    gelu,
    rms_norm,
    rotate,
    rotate_and_write,
    serves_pointwise,
    try_to_rotate,
    write_kv,
)
from atmm.segments import Lane, SegmentPlan
from atmm.strategies.hybrid import gains_from_copies, longest_short_lane
from atmm.strategies.registry import STRATEGIES, reads_in_place
from atmm.tuning.matmul_choice import measure as measure_products
from atmm.tuning.tables import describe as describe_table
from atmm.warmup import compile_ahead, compile_merges, compile_products, compile_quantized_merges

__all__ = [
    "STRATEGIES",
    "FactorTable",
    "Factors",
    "HeadRows",
    "Lane",
    "SegmentPlan",
    "Site",
    "SiteGroup",
    "Tape",
    "add_delta",
    "add_deltas",
    "add_rms_norm",
    "attend",
    "attend_all",
    "attend_chunk",
    "attends_faster",
    "begin_deltas",
    "compile_ahead",
    "compile_merges",
    "compile_products",
    "compile_quantized_merges",
    "describe_table",
    "flash",
    "gains_from_copies",
    "gate_product",
    "gelu",
    "head_logits",
    "load_kernels",
    "longest_short_lane",
    "measure_products",
    "merge",
    "merge_quantized",
    "reads_in_place",
    "rms_norm",
    "rotate",
    "rotate_and_write",
    "serves_attention",
    "serves_flash",
    "serves_pointwise",
    "thin_batches",
    "try_to_rotate",
    "write_kv",
]
