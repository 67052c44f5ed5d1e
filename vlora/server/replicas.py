"""The replicas behind a front end, for operators, and their metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vlora.cluster.cluster import Cluster
from vlora.cluster.on_ray.cluster import RayCluster
from vlora.errors import BadRequest, UnknownReplica
from vlora.types.replicas import SERVING, STATES, AdapterPlace, ClusterStatus, ReplicaStatus, ScalingStatus


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


class ClusterCollector(Collector):
    """status: returns the present status."""

    def __init__(self, status: Callable[[], ClusterStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        states = Counter(replica.state for replica in status.replicas)
        family = GaugeMetricFamily("vlora_replicas", "Replicas, by state.", labels=["state"])
        for state in STATES:
            family.add_metric([state], states[state])
        yield family
        family = GaugeMetricFamily(
            "vlora_replica_requests", "Unfinished requests that were sent to a replica.", labels=["replica"]
        )
        for replica in status.replicas:
            family.add_metric([replica.name], replica.num_requests)
        yield family
        family = GaugeMetricFamily(
            "vlora_replica_failed_adapters", "Adapters that a replica cannot serve.", labels=["replica"]
        )
        for replica in status.replicas:
            family.add_metric([replica.name], replica.num_failed_adapters)
        yield family
        shipped = CounterMetricFamily(
            "vlora_shipped_bytes", "Bytes of adapters' files that were sent to a replica.", labels=["replica"]
        )
        for replica in status.replicas:
            shipped.add_metric([replica.name], replica.num_shipped_bytes)
        yield shipped
        yield GaugeMetricFamily(
            "vlora_cluster_waiting", "Requests that wait for a replica with room.", value=status.num_waiting
        )
        yield CounterMetricFamily(
            "vlora_replica_deaths", "Replicas that were lost while they served.", value=status.num_deaths
        )
        yield CounterMetricFamily(
            "vlora_resubmitted",
            "Requests that continued on another replica because theirs was lost.",
            value=status.num_resubmitted,
        )
        yield CounterMetricFamily(
            "vlora_moves", "Requests that were moved from a replica that serves.", value=status.num_moves
        )
        if status.scaling is not None:
            yield from _scaling(status.scaling)


def _scaling(scaling: ScalingStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily("vlora_replicas_wanted", "Replicas that there should be.", value=scaling.number)
    yield GaugeMetricFamily(
        "vlora_scaling_automatic", "1 while the load decides on the number of replicas.", value=scaling.automatic
    )
    family = CounterMetricFamily(
        "vlora_scaling_decisions", "Changes of the number of replicas, by reason.", labels=["reason"]
    )
    for reason, count in scaling.decisions.items():
        family.add_metric([reason], count)
    yield family
    if scaling.decided_s is not None:
        yield GaugeMetricFamily(
            "vlora_scaling_last_decision_seconds", "Time since the last of these changes.", value=scaling.decided_s
        )
