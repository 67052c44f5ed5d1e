"""Tensor parallelism: sharding of layers and adapters over ranks, and communication between ranks."""

from vlora.parallel.layer_sharding import LinearShard, ShardPlan, Span
from vlora.parallel.process_group import Group
from vlora.parallel.socket_collectives import Ends, RankGone, RanksApart, connect

__all__ = ["Ends", "Group", "LinearShard", "RankGone", "RanksApart", "ShardPlan", "Span", "connect"]
