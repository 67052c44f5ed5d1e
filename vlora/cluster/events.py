"""What happened to the requests of a cluster."""

from __future__ import annotations


class Events:
    """Counts since the start. See `ClusterStatus`."""

    def __init__(self) -> None:
        self.num_deaths = self.num_resubmitted = self.num_moves = 0
