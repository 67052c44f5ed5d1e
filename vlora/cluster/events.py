"""Counts of moves and deaths in a cluster."""

from __future__ import annotations


class Events:
    """Counts since the start. See `ClusterStatus`."""

    def __init__(self) -> None:
        self.num_deaths = self.num_resubmitted = self.num_moves = 0
