"""The status of a cluster for operators: its replicas, its queue, and what happened to requests."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vlora.cluster.adapters import ReplicatedAdapters
from vlora.cluster.members import Member
from vlora.cluster.on_ray.reports import Located
from vlora.routing import Router
from vlora.types.replicas import DOWN, DRAINING, SERVING, ClusterStatus, ReplicaStatus
from vlora.wire.address import Address


class Events:
    """Counts since the start. See `ClusterStatus`."""

    def __init__(self) -> None:
        self.num_deaths = self.num_resubmitted = self.num_moves = 0


def status_of(
    members: Mapping[str, Member], router: Router, events: Events, adapters: ReplicatedAdapters
) -> ClusterStatus:
    return ClusterStatus(
        replicas=tuple(_replica(member, router, adapters) for _, member in sorted(members.items())),
        num_waiting=router.num_waiting,
        num_deaths=events.num_deaths,
        num_resubmitted=events.num_resubmitted,
        num_moves=events.num_moves,
    )


def _replica(member: Member, router: Router, adapters: ReplicatedAdapters) -> ReplicaStatus:
    standing = router.replicas.get(member.name)
    if member.client is None or standing is None:
        return ReplicaStatus(name=member.name, state=DOWN, cause=member.cause, num_requests=0)
    home = adapters.homes.get(member.name)
    state = DRAINING if standing.draining else SERVING
    return ReplicaStatus(
        name=member.name,
        state=state,
        cause="",
        num_requests=len(standing.holds),
        num_failed_adapters=adapters.num_failed(member.name),
        num_shipped_bytes=0 if home is None or home.files is None else home.files.num_bytes_sent,
    )


def with_place(status: ReplicaStatus, found: Located | None, causes: Mapping[str, str]) -> ReplicaStatus:
    """With where it is on Ray, and why it does not start. causes: by the names of replicas."""
    cause = causes.get(status.name, status.cause) if status.state == DOWN else status.cause
    if found is None:
        return msgspec.structs.replace(status, cause=cause)
    address = str(Address(found.at.host, found.at.port))
    return msgspec.structs.replace(
        status, cause=cause, node=found.node, address=address, actor=found.actor, pid=found.at.replica_pid
    )
