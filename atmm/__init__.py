"""ATMM, the adaptive-tiling matmul of V-LoRA (section 4.3): add many adapters' deltas to a packed batch, or merge one.

Build a `SegmentPlan` once per step, call `add_delta` after every adapted linear layer. Knows tensors only: no
requests, no models.
"""

from atmm.ahead import compile_ahead
from atmm.compiled import library as load_kernels
from atmm.compiled.attention import attend, serves_attention
from atmm.compiled.norm import rms_norm, serves_norm
from atmm.divided import gains_from_copies, longest_short_lane
from atmm.head_rows import HeadRows
from atmm.operator import add_delta, add_deltas, head_logits, merge
from atmm.product_choice import measure as measure_products
from atmm.segments import Lane, SegmentPlan
from atmm.sites import Factors, Site, SiteGroup
from atmm.strategies import STRATEGIES
from atmm.tables import describe as describe_table

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
    "gains_from_copies",
    "head_logits",
    "load_kernels",
    "longest_short_lane",
    "measure_products",
    "merge",
    "rms_norm",
    "serves_attention",
    "serves_norm",
]
