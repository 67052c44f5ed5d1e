"""All replicas as the router knows them, indexed by load and by adapter, so that a rule need not look at each."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from vlora.routing.prefixes import PrefixIndex
from vlora.routing.standing import Need, Report, Standing


class Fleet:
    """The standings by name. Rules read it; only the router changes it.

    Attributes:
        replicas: by name. Not to be changed by callers.
        prefixes: which replica has computed which first blocks.
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
        """All replicas in order of their names."""
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
        """A replica has joined."""
        assert standing.name not in self.replicas, f"{standing.name} has joined before"
        self.replicas[standing.name] = standing
        insort(self._names, standing.name)
        self.prefixes.add(standing.name, standing.room.blocks)
        self._enter(standing)

    def remove(self, name: str) -> Standing:
        """A replica has left."""
        standing = self.replicas.pop(name)
        del self._names[bisect_left(self._names, name)]
        self._exit(standing)
        for adapter in standing.resident:
            self._forget(adapter, name)
        self.prefixes.remove(name)
        return standing

    def send(self, need: Need, standing: Standing) -> None:
        """A request is sent to a replica."""
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
        """A replica has reported."""
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

    def check_integrity(self) -> None:
        """Assert that the indexes agree with the standings."""
        assert self._names == sorted(self.replicas)
        indexed = {name: size for size, names in self._by_size.items() for name in names}
        assert indexed == {name: s.size for name, s in self.replicas.items() if s.open}
        for name, standing in self.replicas.items():
            users: dict[str, int] = {}
            for need in standing.holds.values():
                if need.adapter is not None:
                    users[need.adapter] = users.get(need.adapter, 0) + 1
            assert users == {adapter: count for adapter, count in standing.resident.items() if count}
            assert standing.num_used == len(users) and standing.size >= len(standing.holds)
            assert all(name in self._holders[adapter] for adapter in standing.resident)
        assert all(
            adapter in self.replicas[name].resident for adapter, names in self._holders.items() for name in names
        )
