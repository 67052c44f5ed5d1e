"""All replicas as the router knows them, indexed by load and by adapter, so that a rule need not look at each."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence

from vlora.routing.replica_load import Need, ReplicaLoad, Report

_MOST_KEYS = 8192  # per replica
_FIRST_BLOCKS = 64  # of a request; later blocks rarely decide between replicas


class Fleet:
    """The loads by name. Rules read it; only the router changes it.

    Attributes:
        replicas: by name. Not to be changed by callers.
        num_loads: requests that were sent to a replica without their adapter.
    """

    def __init__(self) -> None:
        self.replicas: dict[str, ReplicaLoad] = {}
        self.prefixes = PrefixIndex()
        self.num_loads = 0
        self._names: list[str] = []
        self._by_size: dict[int, list[str]] = {}  # names in order, by number of requests; open replicas only
        self._holders: dict[str, set[str]] = {}  # replicas by adapter on their device

    # -- questions of a rule ------------------------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        return self._names

    def from_busiest(self) -> Iterator[ReplicaLoad]:
        """Open replicas by number of requests, the highest first; among equals the highest name first."""
        for size in sorted(self._by_size, reverse=True):
            for name in reversed(self._by_size[size]):
                yield self.replicas[name]

    def from_lightest(self) -> Iterator[ReplicaLoad]:
        """Open replicas by number of requests, the lowest first; among equals the lowest name first."""
        for size in sorted(self._by_size):
            for name in self._by_size[size]:
                yield self.replicas[name]

    def holders(self, adapter: str) -> list[ReplicaLoad]:
        """Replicas with an adapter on their device, in no particular order."""
        return [self.replicas[name] for name in self._holders.get(adapter, ())]

    # -- changes ------------------------------------------------------------------------------------------------------

    def add(self, replica: ReplicaLoad) -> None:
        assert replica.name not in self.replicas, f"{replica.name} has joined before"
        self.replicas[replica.name] = replica
        insort(self._names, replica.name)
        self.prefixes.add(replica.name, replica.room.blocks)
        self._enter(replica)

    def remove(self, name: str) -> ReplicaLoad:
        replica = self.replicas.pop(name)
        del self._names[bisect_left(self._names, name)]
        self._exit(replica)
        for adapter in replica.resident:
            self._forget(adapter, name)
        self.prefixes.remove(name)
        return replica

    def send(self, need: Need, replica: ReplicaLoad) -> None:
        self._exit(replica)
        adapter = need.adapter
        if adapter is not None and adapter not in replica.resident:
            self.num_loads += 1
            self._holders.setdefault(adapter, set()).add(replica.name)
        displaced = replica.send(need)
        if displaced is not None:
            self._forget(displaced, replica.name)
        if need.prefix:
            self.prefixes.record(replica.name, need.prefix, need.blocks)
        self._enter(replica)

    def release(self, request_id: str, replica: ReplicaLoad) -> Need:
        """A request has ended on a replica, or is taken from there."""
        self._exit(replica)
        need = replica.release(request_id)
        self._enter(replica)
        return need

    def report(self, name: str, report: Report) -> ReplicaLoad:
        replica = self.replicas[name]
        self._exit(replica)
        before = replica.resident.keys()
        replica.apply(report)
        if report.adapters is not None:
            after = replica.resident.keys()
            for adapter in before - after:
                self._forget(adapter, name)
            for adapter in after - before:
                self._holders.setdefault(adapter, set()).add(name)
        self._enter(replica)
        return replica

    def set_draining(self, replica: ReplicaLoad, draining: bool) -> None:
        """Whether a replica takes no further requests."""
        self._exit(replica)
        replica.draining = draining
        self._enter(replica)

    def _forget(self, adapter: str, name: str) -> None:
        holders = self._holders[adapter]
        holders.discard(name)
        if not holders:
            del self._holders[adapter]

    def _enter(self, replica: ReplicaLoad) -> None:
        if replica.open:
            insort(self._by_size.setdefault(replica.size, []), replica.name)

    def _exit(self, replica: ReplicaLoad) -> None:
        if replica.open:
            names = self._by_size[replica.size]
            del names[bisect_left(names, replica.name)]
            if not names:
                del self._by_size[replica.size]


class PrefixIndex:
    """The first blocks of the requests that each replica was sent.

    A prefix cache discards the least recently used blocks when its memory is needed. The index does the same without a
    clock: it counts the blocks that a replica was given to compute, and a key expires once as many blocks as the
    replica has were computed since its last use. The number of keys per replica is limited.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, int] = {}  # capacity, by replica
        self._computed: dict[str, int] = {}  # blocks so far, by replica
        self._used: dict[str, dict[bytes, int]] = {}  # by replica and key: `computed` at its last use, oldest first
        self._replicas: dict[bytes, set[str]] = {}  # by key

    def __len__(self) -> int:
        return sum(map(len, self._used.values()))

    def add(self, name: str, blocks: int) -> None:
        """A replica with so many KV blocks has joined; its cache is empty."""
        self._blocks[name] = blocks
        self._computed[name] = 0
        self._used[name] = {}

    def remove(self, name: str) -> None:
        for key in self._used.pop(name):
            self._discard(key, name)
        del self._blocks[name], self._computed[name]

    def record(self, name: str, keys: Sequence[bytes], blocks: int) -> None:
        """A request with these first blocks, and so many blocks in all, was sent to a replica."""
        used = self._used[name]
        self._computed[name] = now = self._computed[name] + blocks
        for key in keys[:_FIRST_BLOCKS]:
            if used.pop(key, None) is None:
                self._replicas.setdefault(key, set()).add(name)
            used[key] = now
        while used and (len(used) > _MOST_KEYS or now - next(iter(used.values())) > self._blocks[name]):
            key = next(iter(used))
            del used[key]
            self._discard(key, name)

    def known(self, keys: Sequence[bytes]) -> Mapping[str, int]:
        """By replica, the number of leading keys that it is expected to have; only replicas with at least one."""
        found: dict[str, int] = {}
        left = self._replicas.get(keys[0], set()) if keys else set()
        for place, key in enumerate(keys[:_FIRST_BLOCKS]):
            left = left & self._replicas.get(key, set())
            if not left:
                break
            found.update(dict.fromkeys(left, place + 1))
        return found

    def _discard(self, key: bytes, name: str) -> None:
        replicas = self._replicas[key]
        replicas.discard(name)
        if not replicas:
            del self._replicas[key]
