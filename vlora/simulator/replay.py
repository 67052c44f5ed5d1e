"""Replays arrivals on replicas, from the first to the last answer."""

from __future__ import annotations

from collections.abc import Iterable

from vlora.simulator.arrivals import Arrival
from vlora.simulator.cluster import ClusterConfig
from vlora.simulator.measures import Measures
from vlora.simulator.replica import ReplicaConfig
from vlora.simulator.world import World

_ONE = ClusterConfig()


def replay(arrivals: Iterable[Arrival], config: ReplicaConfig, cluster: ClusterConfig = _ONE) -> Measures:
    """Run all arrivals on replicas with these resources and settings, by default on one."""
    return World(config, cluster).run(arrivals)
