"""Tensor parallelism: which part of which layer a rank holds, which part of an adapter, and how ranks talk."""

from vlora.parallel.group import Group
from vlora.parallel.lines import Ends, RankGone, RanksApart, connect
from vlora.parallel.plan import LinearShard, ShardPlan, Span

__all__ = ["Ends", "Group", "LinearShard", "RankGone", "RanksApart", "ShardPlan", "Span", "connect"]
