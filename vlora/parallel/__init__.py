"""Tensor parallelism: sharding of layers and adapters over ranks, and communication between ranks."""

from vlora.parallel.layer_sharding import LinearShard, ShardPlan, Span
from vlora.parallel.process_group import ProcessGroup
from vlora.parallel.socket_collectives import CollectiveFailed, RankDead, RankSockets, connect

__all__ = [
    "CollectiveFailed",
    "LinearShard",
    "ProcessGroup",
    "RankDead",
    "RankSockets",
    "ShardPlan",
    "Span",
    "connect",
]
