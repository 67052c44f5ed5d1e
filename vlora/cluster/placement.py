"""The placement of the router on a live cluster: homes of adapters are planned, and requests that wait are moved.

Planned homes move nothing by themselves: they decide where a further copy of an adapter goes (`PlacedAdapters`).
"""

from __future__ import annotations

from collections.abc import Callable

from vlora.routing import MoveCosts, Router

REPLAN_S, REBALANCE_S = 60.0, 10.0
COSTS = MoveCosts(load_s=0.5, again_s=0.1)
"""Of a move, as assumed in the simulations of docs/decisions/0076; not measured on a cluster."""


class LivePlacement:
    """Calls the router's placement at intervals, and after replicas have joined or left."""

    def __init__(self, router: Router, clock: Callable[[], float], follow: Callable[[str], None]) -> None:
        """Begin without replicas."""
        self._router = router
        self._clock = clock
        self._follow = follow
        self._replan_s = self._rebalance_s = 0.0  # when each is due
        self._looked_s = clock()
        self._busy_s = 0.0  # of all replicas, and the requests that have ended; recent ones count most
        self._num_ended = 0.0

    def replicas_changed(self) -> None:
        """A replica has joined or left: plan with the next `tick`."""
        self._replan_s = self._rebalance_s = self._clock()

    def ended(self) -> None:
        self._num_ended += 1

    def tick(self) -> None:
        """To be called every 100 ms or so."""
        now = self._clock()
        replicas = self._router.replicas.values()
        self._busy_s += (now - self._looked_s) * sum(bool(standing.holds) for standing in replicas)
        self._looked_s = now
        if now >= self._replan_s:
            self._replan_s = now + REPLAN_S
            self._router.replan()
        if now >= self._rebalance_s and self._num_ended:
            self._rebalance_s = now + REBALANCE_S
            if self._some_wait_needlessly():
                for move in self._router.rebalance(self._busy_s / self._num_ended, COSTS):
                    self._follow(move.request_id)
            self._busy_s /= 2
            self._num_ended /= 2

    def _some_wait_needlessly(self) -> bool:
        """Whether one replica has more requests than its batch, and another one fewer: only then is a move worth it."""
        serving = [standing for standing in self._router.replicas.values() if not standing.draining]
        return any(standing.size > standing.room.max_batch_size for standing in serving) and any(
            standing.size < standing.room.max_batch_size for standing in serving
        )
