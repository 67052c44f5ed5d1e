"""Replays arrivals on replicas, from the first to the last answer."""

from __future__ import annotations

import math
from collections.abc import Iterable

from vlora.errors import PromptTooLong
from vlora.simulator.arrivals import Arrival
from vlora.simulator.measures import Measures
from vlora.simulator.replica import Replica, ReplicaConfig
from vlora.simulator.tenants import contested_shares


def replay(arrivals: Iterable[Arrival], config: ReplicaConfig, num_replicas: int = 1) -> Measures:
    """Run all arrivals on `num_replicas` replicas, each on the one with the fewest unfinished requests at that time."""
    replicas = [Replica(config) for _ in range(num_replicas)]
    measures = Measures()
    unfinished = [0] * num_replicas
    pending: dict[str, tuple[float | None, str | None]] = {}  # bound and tenant of unfinished requests

    def run_until(time_s: float) -> None:
        for place, replica in enumerate(replicas):
            for output in replica.run_until(time_s):
                measures.add(output, *pending.pop(output.request_id))
                unfinished[place] -= 1

    for number, arrival in enumerate(arrivals):
        run_until(arrival.time_s)
        place = unfinished.index(min(unfinished))
        replicas[place].wait_until(arrival.time_s)
        try:
            pending[str(number)] = replicas[place].add(str(number), arrival), arrival.tenant
        except PromptTooLong:
            measures.num_refused += 1
        else:
            unfinished[place] += 1
    run_until(math.inf)
    assert not any(unfinished), "a request was never answered"
    measures.close(
        [replica.stats() for replica in replicas],
        [replica.scheduler.waits for replica in replicas],
        max(replica.clock.now for replica in replicas),
        sum(replica.num_loads for replica in replicas),
        contested_shares(replica.contention for replica in replicas),
    )
    return measures
