"""Adds and releases replicas as the policy of a live cluster decides."""

from __future__ import annotations

from typing import Protocol

from vlora.routing import Advice, Router, ScalingPolicy, ScalingSettings
from vlora.routing.scaling import Situation
from vlora.simulator.cluster import ClusterConfig


class Scaled(Protocol):
    """What is scaled."""

    now: float
    router: Router

    def longest_wait_s(self) -> float:
        """How long a request without an answer has waited in the router."""

    def start_after(self, delay_s: float) -> None:
        """Add a replica that serves after a delay."""

    def release(self, name: str) -> None:
        """End an idle replica."""

    def resume(self, name: str) -> None:
        """Stop draining a replica."""


class Scaling:
    """Adds and releases replicas. Unlike a live cluster it may end any of them, and all starts succeed."""

    PERIOD_S = 1.0

    def __init__(self, scaled: Scaled, cluster: ClusterConfig) -> None:
        self._scaled, self._cluster = scaled, cluster
        most = cluster.max_replicas or cluster.replicas
        self._policy = ScalingPolicy(ScalingSettings(cluster.replicas, most, cluster.up_after_s, cluster.down_after_s))
        self._starting: list[float] = []  # when each replica that was added serves
        self._releasing: list[str] = []  # replicas that drain in order to end

    def follow(self, _periodic: None) -> None:
        scaled, cluster = self._scaled, self._cluster
        now, router = scaled.now, scaled.router
        starting = [time_s for time_s in self._starting if time_s > now]
        if len(starting) < len(self._starting):
            self._policy.joined(now)
        self._starting = starting
        self._end_idle()
        advice = router.advice()
        # Failed replicas are replaced apart from this, so there are soon the least number again.
        number = max(cluster.replicas, len(router.replicas) - len(self._releasing) + len(starting))
        seen = Situation(number, len(starting), True, advice, scaled.longest_wait_s())
        decision = self._policy.decide(now, seen)
        if decision is None:
            return
        if decision.number < number:
            self._drain_one(advice)
        for _ in range(decision.number - number):
            if self._releasing:
                scaled.resume(self._releasing.pop())
            else:
                self._starting.append(now + cluster.start_s)
                scaled.start_after(cluster.start_s)

    def _drain_one(self, advice: Advice) -> None:
        names = [name for name in (*advice.release, *advice.drain) if name not in self._releasing][:1]
        for name in names:
            self._scaled.router.drain(name)
            self._releasing.append(name)
        self._end_idle()

    def _end_idle(self) -> None:
        """End what has been drained. A replica that has failed is none of them any more."""
        replicas = self._scaled.router.replicas
        self._releasing = [name for name in self._releasing if name in replicas]
        for name in [name for name in self._releasing if not replicas[name].size]:
            self._releasing.remove(name)
            self._scaled.release(name)
