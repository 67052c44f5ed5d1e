"""Tensor parallelism: which part of which layer a rank holds, which part of an adapter, and how ranks talk."""

from vlora.parallel.layer_sharding import LinearShard, ShardPlan, Span
from vlora.parallel.process_group import Group
from vlora.parallel.socket_collectives import Ends, RankGone, RanksApart, connect

__all__ = ["Ends", "Group", "LinearShard", "RankGone", "RanksApart", "ShardPlan", "Span", "connect"]
