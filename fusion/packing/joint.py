"""Packing by joint training: all domains together, split until every threshold is met, then merged while possible.

Sequential training forgets earlier domains and depends on their order. Joint training does neither, so fewer adapters
are needed. A joint training takes as many steps as its domains would take alone, and a failed one is discarded.
`Oracle` has the limits of any packing, found by joint training too: a lower bound on the number of adapters, and the
exhaustive optimum for a few domains.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from fusion.packing.algorithm import (
    History,
    Packing,
    Say,
    Score,
    TrainingResult,
    TrainTogether,
    Trials,
)

Set = frozenset[str]


def pack_jointly(
    domains: Sequence[str],
    thresholds: Mapping[str, float],
    train: TrainTogether,
    *,
    say: Say = lambda _: None,
    run_ahead: Callable[[Sequence[Set]], None] = lambda _: None,
) -> Packing:
    """Find sets of domains, each trained jointly, in which every domain's lower bound meets its threshold.

    A set that misses thresholds is split into the domains that meet theirs and those that do not. The remaining sets
    are then merged pairwise, smallest first, except for unions that contain a set known to fail. A domain that misses
    its threshold even alone is reported, and its adapter takes no other domain.

    Args:
        run_ahead: called with both parts of a set as soon as it is split; both will be trained.
    """
    trials, found = Trials(thresholds, say), dict[Set, TrainingResult]()

    def below(together: Set) -> dict[str, Score]:
        """The domains that miss their thresholds in one adapter of these domains."""
        found[together] = train(together)
        return trials.add(tuple(sorted(together)), (), found[together])

    def unites(one: Set, other: Set) -> bool:
        return not trials.known_to_fail(one | other) and not below(one | other)

    waiting = [frozenset(domains)]
    kept: list[Set] = []
    missed: list[Set] = []
    while waiting:
        together = waiting.pop()
        broken = below(together)
        if broken and len(together) > 1:
            parts = _split(together, broken, thresholds)
            run_ahead(parts)
            waiting += parts
        else:
            (missed if broken else kept).append(together)
    while (pair := next((pair for pair in _smallest_first(kept) if unites(*pair)), None)) is not None:
        kept = [together for together in kept if together not in pair]
        kept.append(frozenset.union(*pair))
    # Adapters, and the domains in each, in the plan's order.
    named = {tuple(name for name in domains if name in together): found[together] for together in (*kept, *missed)}
    adapters = dict(sorted(named.items(), key=lambda one: list(domains).index(one[0][0])))
    return Packing.of(adapters, trials, {names: History(tuple(sorted(names))) for names in adapters})


def _split(together: Set, below: Mapping[str, Score], thresholds: Mapping[str, float]) -> list[Set]:
    """The domains that meet their thresholds, and the others. If none does, the half furthest below is split off."""
    out = sorted(below, key=lambda name: (below[name].lower - thresholds[name], name))
    if len(out) == len(together):
        out = out[: len(out) // 2]
    return [together.difference(out), frozenset(out)]


def _smallest_first(sets: Sequence[Set]) -> Iterator[tuple[Set, Set]]:
    return iter(sorted(itertools.combinations(sets, 2), key=lambda pair: sum(map(len, pair))))


MAX_DOMAINS = 6  # 203 partitions of 63 sets; seven domains have 877 of 127


@dataclasses.dataclass(frozen=True)
class Bound:
    """At least `adapters` are needed: one per domain that misses alone, and one per member of the largest clique of
    domains that conflict pairwise.

    The bound assumes that two conflicting domains still conflict when more domains are added. It holds for any part of
    the conflicts, so it is valid, if perhaps lower, where only some pairs were tried.
    """

    adapters: int
    missed: tuple[str, ...]
    conflicts: tuple[tuple[str, str], ...]


class Oracle:
    """Calls `train` at most once for each set of domains."""

    def __init__(self, domains: Sequence[str], thresholds: Mapping[str, float], train: TrainTogether) -> None:
        self._domains = tuple(domains)
        self._thresholds = thresholds
        self._train = train
        self._keeps: dict[frozenset[str], bool] = {}

    def bound(self, pairs: Sequence[tuple[str, str]] | None = None) -> Bound:
        """Train every domain, and pairs of domains that meet their thresholds alone.

        Args:
            pairs: those to try; None for all of them.
        """
        missed, others = self._alone()
        tried = itertools.combinations(others, 2) if pairs is None else [p for p in pairs if set(p).issubset(others)]
        conflicts = [pair for pair in tried if not self.keeps(frozenset(pair))]
        clique = _largest_clique(others, {frozenset(pair) for pair in conflicts})
        return Bound(len(missed) + clique, missed, tuple(conflicts))

    def optimum(self) -> tuple[Set, ...] | None:
        """The fewest adapters over all partitions; a domain that misses alone gets its own. Trains only needed sets.

        None if more than `MAX_DOMAINS` domains meet their thresholds alone.
        """
        missed, others = self._alone()
        if len(others) > MAX_DOMAINS:
            return None
        # Among partitions of equal size, even ones first: they are likelier to fit, and the first fit is optimal.
        for partition in sorted(_partitions(others), key=lambda sets: (len(sets), max(map(len, sets), default=0))):
            if all(self.keeps(together) for together in sorted(partition, key=self._known_first)):
                return (*partition, *(frozenset((name,)) for name in missed))
        raise AssertionError("each domain alone is a partition, and all of these keep their thresholds alone")

    def keeps(self, together: frozenset[str]) -> bool:
        """Whether every domain's lower bound meets its threshold in one adapter of these domains."""
        if together not in self._keeps:
            scores = self._train(together).scores
            self._keeps[together] = all(scores[name].lower >= self._thresholds[name] for name in together)
        return self._keeps[together]

    def _alone(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        missed = tuple(name for name in self._domains if not self.keeps(frozenset((name,))))
        return missed, tuple(name for name in self._domains if name not in missed)

    def _known_first(self, together: frozenset[str]) -> tuple[bool, int]:
        # A set known to fail rejects a partition at no cost; of unknown sets, a large one is likelier to fail.
        return self._keeps.get(together) is None, -len(together)


def _partitions(names: tuple[str, ...]) -> Iterator[tuple[frozenset[str], ...]]:
    if not names:
        yield ()
        return
    first, rest = names[0], names[1:]
    for partition in _partitions(rest):
        yield (frozenset((first,)), *partition)
        for place, together in enumerate(partition):
            yield (*partition[:place], together | {first}, *partition[place + 1 :])


def _largest_clique(names: Sequence[str], edges: set[Set]) -> int:
    """The size of the largest group of which every pair is an edge."""
    for size in range(len(names), 1, -1):
        for group in itertools.combinations(names, size):
            if all(frozenset(pair) in edges for pair in itertools.combinations(group, 2)):
                return size
    return min(1, len(names))
