"""Follows the router's advice on the number of replicas, as the keeper of a live cluster does."""

from __future__ import annotations

import math
from typing import Protocol

from vlora.routing import Router
from vlora.simulator.cluster import ClusterConfig


class Scaled(Protocol):
    """What is scaled."""

    now: float
    router: Router

    def start_after(self, delay_s: float) -> None:
        """Add a replica that serves after a delay."""

    def release(self, name: str) -> None:
        """End an idle replica."""

    def resume(self, name: str) -> None:
        """Stop draining a replica."""


class Scaling:
    """Adds and releases replicas once the advice has been the same for long enough."""

    PERIOD_S = 1.0

    def __init__(self, scaled: Scaled, cluster: ClusterConfig) -> None:
        self._scaled, self._cluster = scaled, cluster
        self._add_since = math.inf
        self._idle_since: dict[str, float] = {}
        self._drain_since: dict[str, float] = {}
        self._starting: list[float] = []  # when each replica that was added serves

    def follow(self, _periodic: None) -> None:
        """Act on the present advice."""
        scaled, cluster = self._scaled, self._cluster
        assert cluster.max_replicas is not None
        now, router = scaled.now, scaled.router
        advice = router.advice()
        self._starting = [time_s for time_s in self._starting if time_s > now]
        number = len(router.replicas) + len(self._starting)
        wanted = min(advice.add - len(self._starting), cluster.max_replicas - number)
        self._add_since = min(self._add_since, now) if wanted > 0 else math.inf
        if now - self._add_since >= cluster.up_after_s:
            self._add_since = math.inf
            draining = [name for name, standing in router.replicas.items() if standing.draining][:wanted]
            for name in draining:
                scaled.resume(name)
            for _ in range(wanted - len(draining)):
                self._starting.append(now + cluster.start_s)
                scaled.start_after(cluster.start_s)
        self._idle_since = {name: self._idle_since.get(name, now) for name in advice.release}
        self._drain_since = {name: self._drain_since.get(name, now) for name in advice.drain}
        spare = len(router.replicas) - cluster.replicas
        for name, since in self._idle_since.items():
            if spare > 0 and now - since >= cluster.down_after_s:
                scaled.release(name)
                spare -= 1
        for name, since in self._drain_since.items():
            if spare > 0 and now - since >= cluster.down_after_s:
                router.drain(name)
