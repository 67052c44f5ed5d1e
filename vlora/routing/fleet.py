"""All replicas as the router knows them, indexed by load and by adapter, so that a rule need not look at each."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence

from vlora.routing.standing import Need, Report, Standing

_MOST_KEYS = 8192  # per replica
_FIRST_BLOCKS = 64  # of a request; later blocks rarely decide between replicas


class Fleet:
    """The standings by name. Rules read it; only the router changes it.

    Attributes:
        replicas: by name. Not to be changed by callers.
        num_loads: requests that were sent to a replica without their adapter.
    """

    def __init__(self) -> None:
        self.replicas: dict[str, Standing] = {}
        self.prefixes = PrefixIndex()
        self.num_loads = 0
        self._names: list[str] = []
        self._by_size: dict[int, list[str]] = {}  # names in order, by number of requests; open replicas only
        self._holders: dict[str, set[str]] = {}  # replicas by adapter on their device

    # -- questions of a rule ------------------------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        return self._names

    def from_busiest(self) -> Iterator[Standing]:
        """Open replicas by number of requests, the highest first; among equals the highest name first."""
        for size in sorted(self._by_size, reverse=True):
            for name in reversed(self._by_size[size]):
                yield self.replicas[name]

    def from_lightest(self) -> Iterator[Standing]:
        """Open replicas by number of requests, the lowest first; among equals the lowest name first."""
        for size in sorted(self._by_size):
            for name in self._by_size[size]:
                yield self.replicas[name]

    def holders(self, adapter: str) -> list[Standing]:
        """Replicas with an adapter on their device, in no particular order."""
        return [self.replicas[name] for name in self._holders.get(adapter, ())]

    # -- changes ------------------------------------------------------------------------------------------------------

    def add(self, standing: Standing) -> None:
        assert standing.name not in self.replicas, f"{standing.name} has joined before"
        self.replicas[standing.name] = standing
        insort(self._names, standing.name)
        self.prefixes.add(standing.name, standing.room.blocks)
        self._enter(standing)

    def remove(self, name: str) -> Standing:
        standing = self.replicas.pop(name)
        del self._names[bisect_left(self._names, name)]
        self._exit(standing)
        for adapter in standing.resident:
            self._forget(adapter, name)
        self.prefixes.remove(name)
        return standing

    def send(self, need: Need, standing: Standing) -> None:
        self._exit(standing)
        adapter = need.adapter
        if adapter is not None and adapter not in standing.resident:
            self.num_loads += 1
            self._holders.setdefault(adapter, set()).add(standing.name)
        displaced = standing.send(need)
        if displaced is not None:
            self._forget(displaced, standing.name)
        if need.prefix:
            self.prefixes.record(standing.name, need.prefix, need.blocks)
        self._enter(standing)

    def release(self, request_id: str, standing: Standing) -> Need:
        """A request has ended on a replica, or is taken from there."""
        self._exit(standing)
        need = standing.release(request_id)
        self._enter(standing)
        return need

    def report(self, name: str, report: Report) -> Standing:
        standing = self.replicas[name]
        self._exit(standing)
        before = standing.resident.keys()
        standing.apply(report)
        if report.adapters is not None:
            after = standing.resident.keys()
            for adapter in before - after:
                self._forget(adapter, name)
            for adapter in after - before:
                self._holders.setdefault(adapter, set()).add(name)
        self._enter(standing)
        return standing

    def set_draining(self, standing: Standing, draining: bool) -> None:
        """Whether a replica takes no further requests."""
        self._exit(standing)
        standing.draining = draining
        self._enter(standing)

    def _forget(self, adapter: str, name: str) -> None:
        holders = self._holders[adapter]
        holders.discard(name)
        if not holders:
            del self._holders[adapter]

    def _enter(self, standing: Standing) -> None:
        if standing.open:
            insort(self._by_size.setdefault(standing.size, []), standing.name)

    def _exit(self, standing: Standing) -> None:
        if standing.open:
            names = self._by_size[standing.size]
            del names[bisect_left(names, standing.name)]
            if not names:
                del self._by_size[standing.size]


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
