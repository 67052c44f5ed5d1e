"""The status of a cluster for operators: its replicas, its queue, and what happened to requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vlora.cluster.members import Member
from vlora.routing import Router

SERVING, DRAINING, DOWN = STATES = ("serving", "draining", "down")


class Events:
    """Counts since the start.

    Attributes:
        num_deaths: Replicas that were lost while they served.
        num_resubmitted: Requests that continued elsewhere because of it.
        num_moves: Requests that were moved from a replica that serves.
    """

    def __init__(self) -> None:
        self.num_deaths = self.num_resubmitted = self.num_moves = 0


class ReplicaStatus(NamedTuple):
    """One replica. cause: why it is down; empty otherwise. num_requests: unfinished ones there."""

    name: str
    address: str
    state: str
    cause: str
    num_requests: int


class ClusterStatus(NamedTuple):
    """A cluster. num_waiting: requests that wait for a replica. Others: see `Events`."""

    replicas: tuple[ReplicaStatus, ...]
    num_waiting: int
    num_deaths: int
    num_resubmitted: int
    num_moves: int


def status_of(members: Mapping[str, Member], router: Router, events: Events) -> ClusterStatus:
    """The present status."""
    replicas = tuple(_replica(member, router) for _, member in sorted(members.items()))
    return ClusterStatus(replicas, router.num_waiting, events.num_deaths, events.num_resubmitted, events.num_moves)


def _replica(member: Member, router: Router) -> ReplicaStatus:
    standing = router.replicas.get(member.name)
    if member.client is None or standing is None:
        return ReplicaStatus(member.name, str(member.address), DOWN, member.cause, 0)
    state = DRAINING if standing.draining else SERVING
    return ReplicaStatus(member.name, str(member.address), state, "", len(standing.holds))
