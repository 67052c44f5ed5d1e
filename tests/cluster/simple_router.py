"""A router for tests of the cluster: first come, first served, to the replica with the fewest requests."""

from __future__ import annotations

from typing import NamedTuple

from vlora.cluster.requests_router import Routing


class Need(NamedTuple):
    request_id: str
    adapter: str | None
    blocks: int
    arrival: int
    priority: int = 0
    tenant: str | None = None
    answer_by: float | None = None
    returned: bool = False
    prefix: tuple[bytes, ...] = ()


class Room(NamedTuple):
    max_batch_size: int
    blocks: int


class Report(NamedTuple):
    free_blocks: int
    taken: int
    ended: int
    adapters: frozenset[str]


class Placed(NamedTuple):
    need: Need
    replica: str


class Move(NamedTuple):
    request_id: str
    source: str
    target: str


class Refusal(NamedTuple):
    need: Need
    reason: str


class Refused(NamedTuple):
    refusals: list[Refusal]
    placed: list[Placed]


class SimpleRouter:
    """reports: the last report of each replica."""

    def __init__(self, over: float = 1.5) -> None:
        self.holds: dict[str, dict[str, Need]] = {}
        self.waiting: list[Need] = []
        self.reports: dict[str, Report] = {}
        self.draining: set[str] = set()
        self._over = over
        self._room: dict[str, Room] = {}
        self._barred: set[tuple[str, str | None]] = set()

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def join(self, name: str, room: Room) -> list[Placed]:
        assert name not in self.holds
        self.holds[name], self._room[name] = {}, room
        return self._place()

    def leave(self, name: str) -> list[Need]:
        self.draining.discard(name)
        return sorted(self.holds.pop(name).values(), key=lambda need: need.arrival)

    def drain(self, name: str, draining: bool = True) -> list[Placed]:
        (self.draining.add if draining else self.draining.discard)(name)
        return self._place()

    def bar(self, name: str, adapter: str, barred: bool = True) -> list[Placed]:
        (self._barred.add if barred else self._barred.discard)((name, adapter))
        return self._place()

    def report(self, name: str, report: Report) -> list[Placed]:
        self.reports[name] = report
        return self._place()

    def submit(self, need: Need) -> list[Placed]:
        assert self.where(need.request_id) is None and need not in self.waiting
        self.waiting.append(need)
        self.waiting.sort(key=lambda each: each.arrival)
        return self._place()

    def ended(self, request_id: str) -> list[Placed]:
        self._remove(request_id)
        self.waiting = [need for need in self.waiting if need.request_id != request_id]
        return self._place()

    def grew(self, request_id: str, blocks: int) -> None:
        name = self.where(request_id)
        assert name is not None
        assert blocks > self.holds[name][request_id].blocks
        self.holds[name][request_id] = self.holds[name][request_id]._replace(blocks=blocks)

    def refuse(self, now: float) -> Refused:
        late = [need for need in self.waiting if need.answer_by is not None and need.answer_by < now]
        unfit = [
            need
            for need in self.waiting
            if self.holds and all((name, need.adapter) in self._barred for name in self.holds)
        ]
        self.waiting = [need for need in self.waiting if need not in late and need not in unfit]
        return Refused([*(Refusal(n, "deadline") for n in late), *(Refusal(n, "room") for n in unfit)], [])

    def consolidate(self) -> list[Move]:
        moves = []
        for source in sorted(self.draining):
            for need in tuple(self.holds[source].values()):
                target = self._choose(need)
                if target is not None:
                    del self.holds[source][need.request_id]
                    self.holds[target][need.request_id] = need
                    moves.append(Move(need.request_id, source, target))
        return moves

    def where(self, request_id: str) -> str | None:
        return next((name for name, holds in self.holds.items() if request_id in holds), None)

    def _choose(self, need: Need) -> str | None:
        open_ones = [
            name
            for name, holds in sorted(self.holds.items())
            if name not in self.draining
            and (name, need.adapter) not in self._barred
            and len(holds) < self._over * self._room[name].max_batch_size
        ]
        return min(open_ones, key=lambda name: len(self.holds[name]), default=None)

    def _place(self) -> list[Placed]:
        placed = []
        while self.waiting and (name := self._choose(self.waiting[0])) is not None:
            need = self.waiting.pop(0)
            self.holds[name][need.request_id] = need
            placed.append(Placed(need, name))
        return placed

    def _remove(self, request_id: str) -> None:
        for holds in self.holds.values():
            holds.pop(request_id, None)


def simple_routing(router: SimpleRouter) -> Routing:
    return Routing(router, Need, Room, Report)
