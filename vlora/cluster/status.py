"""The status of a cluster for operators: its replicas, its queue, and what happened to requests."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vlora.cluster.adapters import ReplicatedAdapters
from vlora.cluster.members import Member
from vlora.cluster.on_ray.reports import Located
from vlora.cluster.replica_adapters import ReplicaAdapters
from vlora.routing import Router
from vlora.types import AdapterStatus
from vlora.types.replicas import (
    DEVICE,
    DOWN,
    DRAINING,
    FAILED,
    HOST,
    PENDING,
    REGISTERED,
    SERVING,
    UNKNOWN,
    AdapterPlace,
    ClusterStatus,
    ReplicaStatus,
)
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
    replica = router.replicas.get(member.name)
    if member.client is None or replica is None:
        return ReplicaStatus(name=member.name, state=DOWN, cause=member.cause, num_requests=0)
    home = adapters.homes.get(member.name)
    state = DRAINING if replica.draining else SERVING
    return ReplicaStatus(
        name=member.name,
        state=state,
        cause="",
        num_requests=replica.size,
        num_failed_adapters=0 if home is None else home.num_failed,
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


async def places_of(adapters: ReplicatedAdapters, members: Mapping[str, Member]) -> tuple[AdapterPlace, ...]:
    by_replica = await adapters.by_replica()
    found = []
    for replica, member in sorted(members.items()):
        home, own = adapters.homes.get(replica), by_replica.get(replica)
        if home is None or own is None:
            cause = member.cause if home is None else "it does not answer"
            found += [_unknown(adapter, replica, cause) for adapter in adapters.state.adapters]
            continue
        statuses = {status.name: status for status in own}
        found += [_place(adapter, home, statuses.get(adapter)) for adapter in adapters.state.adapters]
    return tuple(sorted(found, key=lambda each: (each.adapter, each.replica)))


def _unknown(adapter: str, replica: str, cause: str) -> AdapterPlace:
    return AdapterPlace(adapter=adapter, replica=replica, state=UNKNOWN, version="", pinned=False, cause=cause)


def _place(adapter: str, home: ReplicaAdapters, status: AdapterStatus | None) -> AdapterPlace:
    failure = home.failures.get(adapter)
    cause = "" if failure is None else failure.error.message
    if failure is not None and failure.is_coming:
        state, cause = PENDING, home.progress(adapter)
    elif failure is not None and failure.bars:
        state = FAILED
    elif status is None:
        state = PENDING
    elif status.error is not None:
        state, cause = FAILED, status.error
    else:
        state = DEVICE if status.resident else HOST if status.loaded else REGISTERED
    version, pinned = ("", False) if status is None else (status.version, status.pinned)
    return AdapterPlace(adapter=adapter, replica=home.name, state=state, version=version, pinned=pinned, cause=cause)
