"""Packing by joint training: all domains together, split until every threshold is met, then merged while possible.

Sequential training forgets earlier domains and depends on their order. Joint training does neither, so fewer adapters
are needed. A joint training takes as many steps as its domains would take alone, and a failed one is discarded.
"""

from __future__ import annotations

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
