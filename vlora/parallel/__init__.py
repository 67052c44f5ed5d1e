"""Tensor parallelism: which part of which layer a rank holds, which part of an adapter, and how ranks talk."""

from vlora.parallel.group import Group
from vlora.parallel.plan import LinearShard, ShardPlan, Span

__all__ = ["Group", "LinearShard", "ShardPlan", "Span"]
