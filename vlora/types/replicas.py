"""The status of several replicas behind one server."""

from __future__ import annotations

import msgspec

SERVING, DRAINING, DOWN = STATES = ("serving", "draining", "down")


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One replica.

    Attributes:
        state: One of `STATES`.
        cause: Why it is down; empty otherwise.
        num_requests: Unfinished requests there.
    """

    name: str
    state: str
    cause: str
    num_requests: int


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas, their queue, and counts since the start.

    Attributes:
        num_waiting: Requests that wait for a replica with room.
        num_deaths: Replicas that were lost while they served.
        num_resubmitted: Requests that continued elsewhere because of it.
        num_moves: Requests that were moved from a replica that serves.
    """

    replicas: tuple[ReplicaStatus, ...]
    num_waiting: int
    num_deaths: int
    num_resubmitted: int
    num_moves: int
