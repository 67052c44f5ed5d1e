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
    Score,
    Step,
    TrainingResult,
    TrainTogether,
    below_threshold,
    format_scores,
)

Set = frozenset[str]


def pack_jointly(
    domains: Sequence[str],
    thresholds: Mapping[str, float],
    train: TrainTogether,
    *,
    say: Callable[[str], None] = lambda _: None,
    run_ahead: Callable[[Sequence[Set]], None] = lambda _: None,
) -> Packing:
    """Find sets of domains, each trained jointly, in which every domain's lower bound meets its threshold.

    A set that misses thresholds is split into the domains that meet theirs and those that do not. The remaining sets
    are then merged pairwise, smallest first, except for unions that contain a set known to fail. A domain that misses
    its threshold even alone is reported, and its adapter takes no other domain.

    Args:
        run_ahead: called with both parts of a set as soon as it is split; both will be trained.
    """
    found = _TrainedSets(thresholds, train, say)
    waiting = [frozenset(domains)]
    kept: list[Set] = []
    missed: dict[str, Score] = {}
    while waiting:
        together = waiting.pop()
        below = found.below(together)
        if not below:
            kept.append(together)
        elif len(together) == 1:
            missed.update(below)
        else:
            parts = _split(together, below, thresholds)
            run_ahead(parts)
            waiting += parts
    while (pair := next((pair for pair in _smallest_first(kept) if found.unites(*pair)), None)) is not None:
        kept = [together for together in kept if together not in pair]
        kept.append(frozenset.union(*pair))
    # Adapters, and the domains in each, in the plan's order.
    sets = [*kept, *(frozenset((name,)) for name in missed)]
    named = {tuple(name for name in domains if name in together): found.trained[together] for together in sets}
    adapters = dict(sorted(named.items(), key=lambda one: list(domains).index(one[0][0])))
    histories = {names: History(tuple(sorted(names))) for names in adapters}
    return Packing.of(adapters, found.steps, missed, thresholds, histories)


class _TrainedSets:
    """Results of trained sets; each set is trained at most once."""

    def __init__(self, thresholds: Mapping[str, float], train: TrainTogether, say: Callable[[str], None]) -> None:
        self._thresholds = thresholds
        self._train = train
        self._say = say
        self._failed: list[Set] = []
        self.trained: dict[Set, TrainingResult] = {}
        self.steps: list[Step] = []

    def below(self, together: Set) -> dict[str, Score]:
        """The domains that miss their thresholds in one adapter of these domains."""
        trained = self._train(together)
        below = below_threshold(trained.scores, self._thresholds)
        self.trained[together] = trained
        names = tuple(sorted(together))
        self.steps.append(Step(names, (), trained, below, kept=not below or len(names) == 1))
        if below:
            self._failed.append(together)
            why = "misses its threshold even alone" if len(names) == 1 else "do not fit into one adapter"
            self._say(f"{', '.join(names)} {why}: {format_scores(below, self._thresholds)}")
        else:
            self._say(f"{', '.join(names)} in one adapter: {format_scores(trained.scores, self._thresholds)}")
        return below

    def unites(self, one: Set, other: Set) -> bool:
        union = one | other
        return not any(failed <= union for failed in self._failed) and not self.below(union)


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
    clique: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Optimum:
    """A partition of the domains with the fewest sets, and the number of sets trained to prove it."""

    adapters: tuple[frozenset[str], ...]
    missed: tuple[str, ...]
    num_trained: int


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
        return Bound(len(missed) + len(clique), missed, tuple(conflicts), clique)

    def optimum(self) -> Optimum:
        """The fewest adapters over all partitions; a domain that misses alone gets its own. Trains only needed sets."""
        missed, others = self._alone()
        if len(others) > MAX_DOMAINS:
            raise ValueError(f"{len(others)} domains: the exhaustive optimum is for {MAX_DOMAINS} at most")
        # Among partitions of equal size, even ones first: they are likelier to fit, and the first fit is optimal.
        for partition in sorted(_partitions(others), key=lambda sets: (len(sets), max(map(len, sets), default=0))):
            if all(self.keeps(together) for together in sorted(partition, key=self._known_first)):
                alone = tuple(frozenset((name,)) for name in missed)
                return Optimum((*partition, *alone), missed, len(self._keeps))
        raise AssertionError("each domain alone is a partition, and all of these keep their thresholds alone")

    def optimum_of_few(self) -> Optimum | None:
        """`optimum`, or None if more than `MAX_DOMAINS` domains meet their thresholds alone."""
        _, others = self._alone()
        return self.optimum() if len(others) <= MAX_DOMAINS else None

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


def _largest_clique(names: Sequence[str], edges: set[frozenset[str]]) -> tuple[str, ...]:
    for size in range(len(names), 1, -1):
        for group in itertools.combinations(names, size):
            if all(frozenset(pair) in edges for pair in itertools.combinations(group, 2)):
                return group
    return tuple(names[:1])
