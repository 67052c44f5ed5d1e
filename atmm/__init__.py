"""ATMM: add many adapters' low-rank deltas to one batch, and merge one adapter into all layers in one shot."""

from atmm.operator import HeadRows, add_delta, head_logits, merge
from atmm.segments import Lane, SegmentPlan
from atmm.selection import STRATEGIES, force
from atmm.sites import Factors, Site, SiteGroup

__all__ = [
    "STRATEGIES",
    "Factors",
    "HeadRows",
    "Lane",
    "SegmentPlan",
    "Site",
    "SiteGroup",
    "add_delta",
    "force",
    "head_logits",
    "merge",
]
