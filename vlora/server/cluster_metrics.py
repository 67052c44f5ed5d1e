"""Metrics of a cluster: its replicas, the requests of each, and what happened to requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vlora.types.replicas import STATES, ClusterStatus, ScalingStatus


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
