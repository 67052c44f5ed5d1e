"""Rules: which replica gets the next request."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable

from vlora.routing.fleet import Fleet
from vlora.routing.placement import proactive
from vlora.routing.replica_load import Need, ReplicaLoad

_LEAST_PERIOD = 1024  # requests after which the demand so far counts half
_SPILL = 0.5  # of a batch: above it, a much lighter replica may become a further home
_LIGHTER = 0.25  # of a batch: how much lighter that replica must be
_TRIED = 32  # lightly loaded replicas that are compared
_NEAR = 0.25  # of a batch: how many more requests a replica with the adapter or prefix may have than the lightest one


class Rule:
    """Chooses a replica for the first request of the queue.

    Attributes:
        queues: requests wait in the router while no replica has room. Otherwise they are sent on at once.
        by_arrival: the queue is ordered by arrival alone.
        over: requests that a replica takes at a time, in batches.
        consolidates: busy replicas are filled first, so that others become idle and can be released.
    """

    name: str
    queues = True
    by_arrival = False
    over = 1.5
    consolidates = False

    def choose(self, fleet: Fleet, need: Need) -> ReplicaLoad | None:
        """The replica for a request; None to let it wait, only if no replica takes it (`ReplicaLoad.takes`)."""
        raise NotImplementedError

    def submitted(self, need: Need) -> None:
        """A request was submitted, which counts towards the demand for its adapter."""

    def replan(self, fleet: Fleet) -> None:
        """Plan which replicas are homes of which adapters."""

    def homes(self, adapter: str) -> Iterable[str]:
        return ()


class Punica(Rule):
    """The replica with the most requests that has room, so that idle ones remain idle (Punica section 5.1).

    First come, first served, and no more than a batch per replica. Adapters have no influence: their loading is assumed
    to cost nothing.
    """

    name = "punica"
    by_arrival = True
    over = 1.0
    consolidates = True

    def choose(self, fleet: Fleet, need: Need) -> ReplicaLoad | None:
        return busiest(fleet, need)


class WhereItIs(Rule):
    """The busiest replica with the adapter and room in its batch, else the busiest with a place for the adapter."""

    name = "where_it_is"
    consolidates = True

    def choose(self, fleet: Fleet, need: Need) -> ReplicaLoad | None:
        holders = fleet.holders(need.adapter) if need.adapter is not None else []
        within = [s for s in holders if s.size < s.room.max_batch_size and s.takes(need)]
        if within:
            return max(within, key=lambda s: (s.size, s.name))
        busy = (s for s in fleet.from_busiest() if s.size < s.room.max_batch_size)
        with_place = (s for s in busy if s.takes(need) and s.place_for(need.adapter) < 2)
        # If all batches are full: where it will be served soonest.
        return next(with_place, None) or next((s for s in fleet.from_lightest() if s.takes(need)), None)


class LeastLoaded(Rule):
    """The replica with the fewest requests. Requests never wait in the router, whatever the room."""

    name = "least_loaded"
    queues = False
    over = math.inf

    def choose(self, fleet: Fleet, need: Need) -> ReplicaLoad | None:
        return next((s for s in fleet.from_lightest() if s.serves(need)), None)


class RoundRobin(Rule):
    """The replicas in turn. Requests never wait in the router, whatever the room."""

    name = "round_robin"
    queues = False
    over = math.inf

    def __init__(self) -> None:
        self._last = ""

    def choose(self, fleet: Fleet, need: Need) -> ReplicaLoad | None:
        names = fleet.names
        start = bisect_right(names, self._last)
        for place in range(len(names)):
            replica = fleet.replicas[names[(start + place) % len(names)]]
            if replica.open and replica.serves(need):
                self._last = replica.name
                return replica
        return None


class PlacedAdapters(Rule):
    """The least loaded replica with the adapter; further copies under load, where the plan has its homes.

    Where loading an adapter costs more than a slightly smaller batch, requests should meet where their adapter is. A
    request goes elsewhere if no replica with its adapter has room, or if these are busy, another one is much lighter,
    and the adapter has fewer than `most_homes` copies or the batches of its replicas are full. Copies that are no
    longer used are displaced by others.

    A new copy is placed on a lightly loaded replica with a free place, of these on a planned home. The plan distributes
    adapters by demand (`placement.proactive`, after dLoRA section 5). It places nothing by itself: adapters that move
    with each change of the demand cost more loads than they save. Among about equally loaded replicas, the one that
    knows the longest prefix of the request is preferred.

    Args:
        most_homes: upper limit of the copies of an adapter, unless its demand exceeds them.
    """

    name = "placed"

    def __init__(self, most_homes: int = 8) -> None:
        self._most_homes = most_homes
        self._demand: dict[str, float] = {}
        self._total = 0.0
        self._num_since = 0
        self._homes: dict[str, set[str]] = {}

    def submitted(self, need: Need) -> None:
        if need.adapter is not None and not need.returned:
            self._demand[need.adapter] = self._demand.get(need.adapter, 0.0) + 1.0
            self._total += 1.0
            self._num_since += 1
            if self._num_since >= max(_LEAST_PERIOD, 4 * len(self._demand)):
                # Recent requests count most, and an adapter without any is forgotten.
                self._demand = {name: rate / 2 for name, rate in self._demand.items() if rate > 0.1}
                self._total = math.fsum(self._demand.values())
                self._num_since = 0

    def homes(self, adapter: str) -> Iterable[str]:
        return self._homes.get(adapter, ())

    def replan(self, fleet: Fleet) -> None:
        serving = [s for s in fleet.replicas.values() if not s.draining]
        slots = {s.name: min(s.room.adapters, len(self._demand)) for s in serving}
        plan = proactive(self._demand, slots, {s.name: s.resident.keys() for s in serving}, most_homes=self._most_homes)
        self._homes = {}
        for name, adapters in plan.items():
            for adapter in adapters:
                self._homes.setdefault(adapter, set()).add(name)

    def choose(self, fleet: Fleet, need: Need) -> ReplicaLoad | None:
        if need.adapter is None:
            return _light(fleet, need)
        holders = fleet.holders(need.adapter)
        best = _lightest(fleet, need, holders)
        if best is not None and best.size <= _SPILL * best.room.max_batch_size:
            return best
        other = _light(fleet, need, self._homes.get(need.adapter, ()))
        if best is None or other is None:
            return best or other
        lighter = other.size + _LIGHTER * other.room.max_batch_size < best.size
        worth = self._demand.get(need.adapter, 0.0) / self._total * len(fleet.replicas) if self._total else 0.0
        bounded = len(holders) < max(self._most_homes, worth)
        return other if lighter and (bounded or best.size >= best.room.max_batch_size) else best


def busiest(fleet: Fleet, need: Need) -> ReplicaLoad | None:
    """The replica with the most requests that has room."""
    return next((replica for replica in fleet.from_busiest() if replica.takes(need)), None)


def _lightest(fleet: Fleet, need: Need, candidates: Iterable[ReplicaLoad]) -> ReplicaLoad | None:
    """The least loaded candidate with room, or one that is hardly busier and knows a longer prefix."""
    found = [s for s in candidates if s.takes(need)]
    if len(found) < 2:
        return found[0] if found else None
    best = min(found, key=lambda s: (s.size, s.name))
    if not need.prefix:
        return best
    known = fleet.prefixes.known(need.prefix)
    near = [s for s in found if s.size <= best.size + _NEAR * s.room.max_batch_size]
    return min(near, key=lambda s: (-known.get(s.name, 0), s.size, s.name))


def _light(fleet: Fleet, need: Need, homes: Collection[str] = ()) -> ReplicaLoad | None:
    """Of the replicas with room, one that is hardly busier than the lightest.

    In order of preference: a replica with a place for the adapter, a planned home, one that knows the prefix.
    """
    with_room = (s for s in fleet.from_lightest() if s.takes(need))
    lightest = next(with_room, None)
    if lightest is None:
        return None
    most = lightest.size + _NEAR * lightest.room.max_batch_size
    near = itertools.takewhile(
        lambda s: s.size <= most, itertools.chain([lightest], itertools.islice(with_room, _TRIED))
    )
    if not homes and not need.prefix:
        # The first with the best place is the lightest of these.
        best, best_place = lightest, lightest.place_for(need.adapter)
        for replica in near:
            if best_place == 0:
                break
            place = replica.place_for(need.adapter)
            if place < best_place:
                best, best_place = replica, place
        return best
    known = fleet.prefixes.known(need.prefix) if need.prefix else {}
    named = (fleet.replicas[name] for name in itertools.chain(known, homes) if name in fleet.replicas)
    also = (s for s in named if s.size <= most and s.takes(need))

    def rank(replica: ReplicaLoad) -> tuple[int, bool, int, int, str]:
        name = replica.name
        return replica.place_for(need.adapter), name not in homes, -known.get(name, 0), replica.size, name

    return min(itertools.chain(near, also), key=rank)


RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (PlacedAdapters, Punica, WhereItIs, LeastLoaded, RoundRobin)
}
"""All rules by name; the first is the default."""
