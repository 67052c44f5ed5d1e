"""Where each adapter is, for operators: every desired adapter on every replica, with the reason where it is not."""

from __future__ import annotations

from collections.abc import Mapping

from vlora.cluster.adapter_home import AdapterHome
from vlora.cluster.adapters import ReplicatedAdapters
from vlora.cluster.members import Member
from vlora.types import AdapterStatus
from vlora.types.replicas import DEVICE, FAILED, HOST, PENDING, REGISTERED, UNKNOWN, AdapterPlace


async def places_of(adapters: ReplicatedAdapters, members: Mapping[str, Member]) -> tuple[AdapterPlace, ...]:
    """All places, by adapter and then by replica."""
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


def _place(adapter: str, home: AdapterHome, status: AdapterStatus | None) -> AdapterPlace:
    failure = home.failures.get(adapter)
    cause = "" if failure is None else failure.error.message
    if adapter in home.coming:
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
