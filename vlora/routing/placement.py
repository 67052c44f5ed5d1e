"""Where adapters are placed on replicas (dLoRA section 5): proactively by demand, reactively by load. Pure functions.

Proactive: how many copies each adapter gets and on which replicas, stable under small changes of demand and of the
replicas. Reactive: if some replicas would finish much later than others, requests move together with their adapters.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from hashlib import blake2b
from typing import NamedTuple

_POINTS = 16  # of a replica on the ring
_CANDIDATES = 8  # replicas that are compared for an adapter, in addition to two for each of its copies
_FEW_REPLICAS = 64  # up to here all replicas are compared
_TARGETS = 4  # of the least loaded replicas, as targets of one shift
_LEAST_GAIN = 0.01  # of the longest time, below which no further shift is worth its cost


class Ring:
    """Consistent hashing: the order in which replicas are candidates for an adapter.

    A replica that joins or leaves changes the first candidates of few adapters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        points = sorted((_hash(f"{name}\0{place}"), name) for name in names for place in range(_POINTS))
        self._hashes = [point for point, _ in points]
        self._names = [name for _, name in points]

    def candidates(self, adapter: str) -> Iterator[str]:
        """All replicas in the adapter's order, lazily; names repeat."""
        start, names = bisect_right(self._hashes, _hash(adapter)), self._names
        return (names[(start + place) % len(names)] for place in range(len(names)))

    def first(self, adapter: str, number: int) -> list[str]:
        """The first candidates of an adapter, at most `number`."""
        found: dict[str, None] = {}
        for name in self.candidates(adapter):
            found[name] = None
            if len(found) == number:
                break
        return list(found)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def proactive(
    rates: Mapping[str, float],
    slots: Mapping[str, int],
    now: Mapping[str, Set[str]],
    *,
    most_homes: int = 8,
    keep: float = 0.25,
) -> dict[str, set[str]]:
    """Assign adapters to replicas: a home for each adapter that fits, and several for those in high demand.

    The number of homes follows an adapter's share of the demand: one for each replica's worth of it.

    Args:
        rates: demand by adapter, in any unit. Adapters in highest demand are placed first.
        most_homes: upper limit of an adapter's homes, unless its demand exceeds them.
        keep: a replica that has the adapter keeps it while its load is at most this part of an average load above the
            average, or above the lightest candidate's. A replica that joins so gets less than its share at first.

    Returns:
        The adapters of each replica.
    """
    placed: dict[str, set[str]] = {name: set() for name in slots}
    if not slots:
        return placed
    fair = (math.fsum(rates.values()) or 1.0) / len(slots)
    copies = {name: _num_copies(rate / fair, most_homes, len(slots)) for name, rate in rates.items()}
    load = dict.fromkeys(slots, 0.0)
    left = dict(slots)
    num_left = sum(left.values())
    ring = Ring(list(slots))
    present: dict[str, list[str]] = {}
    for name, adapters in now.items():
        for adapter in adapters if name in slots else ():
            present.setdefault(adapter, []).append(name)
    for adapter in sorted(rates, key=lambda name: (-rates[name] / copies[name], name)):
        share = rates[adapter] / copies[adapter]
        number = len(slots) if len(slots) <= _FEW_REPLICAS else _CANDIDATES + 2 * copies[adapter]
        order = ring.first(adapter, number)
        own = set(present.get(adapter, ()))
        for _ in range(copies[adapter]):
            if not num_left:
                break
            free = [
                name for name in (*order, *sorted(own.difference(order))) if left[name] and adapter not in placed[name]
            ]
            if not free:  # full: the next one on the ring with a free slot
                further = (name for name in ring.candidates(adapter) if left[name] and adapter not in placed[name])
                free = list(itertools.islice(further, 1))
            if not free:
                break
            lightest = min(load[name] for name in free)
            most = max(lightest + keep * fair, (1 + keep) * fair - share)
            best = next((name for name in free if name in own and load[name] <= most), None)
            best = best or next(name for name in free if load[name] <= lightest + keep * fair)
            placed[best].add(adapter)
            load[best] += share
            left[best] -= 1
            num_left -= 1
    return placed


def _num_copies(replicas_worth: float, most_homes: int, num_replicas: int) -> int:
    """Homes for a demand of so many replicas' worth. Above `most_homes`, each home has at least a replica's worth."""
    copies = max(1, round(replicas_worth))
    if copies > most_homes:
        copies = max(most_homes, math.floor(replicas_worth))
    return min(copies, num_replicas)


class Group(NamedTuple):
    """Unfinished requests of one adapter on one replica: their number, and the seconds that each one still costs."""

    adapter: str | None
    replica: str
    number: int
    cost_s: float


class Shift(NamedTuple):
    """So many requests of an adapter move from one replica to another."""

    adapter: str | None
    source: str
    target: str
    number: int


class MoveCosts(NamedTuple):
    """Seconds to load an adapter on a further replica, and to compute a moved request's KV again."""

    load_s: float
    again_s: float


def reactive(
    groups: Sequence[Group],
    resident: Mapping[str, Set[str]],
    slots: Mapping[str, int],
    costs: MoveCosts,
    most: int = 64,
) -> list[Shift]:
    """Choose requests to move so that the last replica finishes earlier; a greedy form of dLoRA's co-migration.

    Each shift moves requests of one adapter from the replica that finishes last to one of those that finish first, if
    it saves more than it costs.

    Args:
        groups: all unfinished requests.
        resident: the adapters of each replica.
    """
    ends = dict.fromkeys(slots, 0.0)
    # On each replica, by adapter and the replica where they are now: number of requests, and the cost of each.
    here: dict[str, dict[tuple[str | None, str], tuple[int, float]]] = {name: {} for name in slots}
    for group in groups:
        ends[group.replica] += group.number * group.cost_s
        here[group.replica][group.adapter, group.replica] = group.number, group.cost_s
    held = {name: set(resident.get(name, ())) for name in slots}
    shifts: Counter[tuple[str | None, str, str]] = Counter()
    for _ in range(most):
        source = max(ends, key=ends.__getitem__)
        found = _best_shift(source, ends, here[source], held, slots, costs)
        if found is None or found.gain_s < _LEAST_GAIN * ends[source]:
            break
        (adapter, origin), target, number = found.requests, found.target, found.number
        count, cost_s = here[source][adapter, origin]
        here[source][adapter, origin] = count - number, cost_s
        here[target][adapter, origin] = here[target].get((adapter, origin), (0, cost_s))[0] + number, cost_s
        ends[source] -= number * found.saved_s
        ends[target] += number * found.added_s + found.load_s
        shifts[adapter, origin, source] -= number
        shifts[adapter, origin, target] += number
        if adapter is not None:
            held[target].add(adapter)
    return [Shift(*key, number) for key, number in shifts.items() if number > 0 and key[1] != key[2]]


class _Candidate(NamedTuple):
    """saved_s and added_s: seconds for each request that the source loses and the target gets."""

    gain_s: float
    requests: tuple[str | None, str]
    target: str
    number: int
    saved_s: float
    added_s: float
    load_s: float


def _best_shift(
    source: str,
    ends: Mapping[str, float],
    here: Mapping[tuple[str | None, str], tuple[int, float]],
    held: Mapping[str, Set[str]],
    slots: Mapping[str, int],
    costs: MoveCosts,
) -> _Candidate | None:
    """The shift from `source` that makes the later of both replicas finish earliest."""
    best: _Candidate | None = None
    for target in heapq.nsmallest(_TARGETS, ends, key=ends.__getitem__):
        gap = ends[source] - ends[target]
        for (adapter, origin), (count, cost_s) in here.items():
            there = adapter is None or adapter in held[target]
            if not there and len(held[target]) >= slots[target]:
                continue
            load_s = 0.0 if there else costs.load_s
            if cost_s <= 0:
                continue
            saved_s = cost_s + (costs.again_s if source != origin else 0.0)
            added_s = cost_s + (costs.again_s if target != origin else 0.0)
            number = min(count, int((gap - load_s) / (saved_s + added_s)))
            if number < 1:
                continue
            gain = min(number * saved_s, gap - number * added_s - load_s)
            if best is None or gain > best.gain_s:
                best = _Candidate(gain, (adapter, origin), target, number, saved_s, added_s, load_s)
    return best
