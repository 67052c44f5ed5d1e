"""The replicas behind a front end, for operators."""

from __future__ import annotations

from typing import Literal

from vlora.cluster.cluster import Cluster
from vlora.cluster.on_ray.cluster import RayCluster
from vlora.errors import BadRequest, UnknownReplica
from vlora.types.replicas import SERVING, AdapterPlace, ClusterStatus, ReplicaStatus


class Replicas:
    """Status and changes of the replicas. cluster: None if there is one engine."""

    def __init__(self, cluster: Cluster | None) -> None:
        self._cluster = cluster

    @property
    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """None for one engine."""
        return () if self._cluster is None else self._cluster.status().replicas

    async def status(self) -> ClusterStatus:
        """Raises UnknownReplica if there is one engine."""
        return self._several().status()

    async def adapters(self) -> tuple[AdapterPlace, ...]:
        """Every adapter on every replica. Raises BadRequest if there is one engine."""
        return await self._several().adapter_places()

    async def adapters_by_name(self) -> dict[str, list[AdapterPlace]]:
        """As `adapters`; empty for one engine."""
        found: dict[str, list[AdapterPlace]] = {}
        for place in () if self._cluster is None else await self.adapters():
            found.setdefault(place.adapter, []).append(place)
        return found

    async def drain(self, name: str, wait_s: float) -> bool:
        """Move a replica's requests to others, and send it no further ones. Returns whether it has none left.

        Raises:
            UnknownReplica: There is no such replica.
            BadRequest: No other one serves.
        """
        cluster = self._several()
        others = [each.name for each in cluster.status().replicas if each.name != name and each.state == SERVING]
        if name in cluster.members and not others:
            raise BadRequest(f"no other replica than {name!r} serves; resume another one before this one is drained")
        return await cluster.drain(name, wait_s)

    async def resume(self, name: str) -> None:
        """Send requests to a drained replica again. Raises UnknownReplica if there is none."""
        self._several().resume(name)

    async def scale(self, number: int | Literal["auto"], wait_s: float) -> bool:
        """Have another number of replicas, or let the load decide. Returns whether that is so by now.

        See `RayCluster.scale`.
        """
        cluster = self._several()
        if not isinstance(cluster, RayCluster):
            raise BadRequest("the replicas of this server were not started by it; their number cannot be changed here")
        return await cluster.scale(number, wait_s)

    def _several(self) -> Cluster:
        if self._cluster is None:
            raise UnknownReplica("this server has one engine; start it with --replicas 2 or more to have replicas")
        return self._cluster
