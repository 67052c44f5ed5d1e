"""Packing within a bound on cost: one joint training of all domains, then repairs that its failures guide.

A domain that meets its threshold in a joint training stays in that adapter, so only the others are trained again: in
groups without measured conflicts, then one by one into an existing adapter, then alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from fusion.packing.algorithm import (
    Adapter,
    History,
    Packing,
    Say,
    Score,
    TrainingResult,
    Trials,
    below_threshold,
    format_scores,
)
from fusion.plan.schema import Plan

Set = frozenset[str]
Conflicts = Mapping[Set, float]
BUDGET = 2  # single-domain trainings per domain
_SHARE = 3  # after the first trainings, a joint one takes at most one part in this many of what is left to spend
_FEW = 3  # domains that are trained all at once first in any case
_CONFLICT = 0.1  # two domains conflict if the cosine of their gradients is below minus this


class Trainings(Protocol):
    """The trainings of a search. Each is deterministic, so its history identifies it."""

    @property
    def conflict_cost(self) -> float:
        """Cost of `conflicts` per domain, in single-domain trainings."""

    def together(self, domains: Collection[str]) -> TrainingResult:
        """Train domains jointly into a new adapter. It costs one single-domain training per domain."""

    def join(self, before: History, beside: Adapter, domain: str) -> TrainingResult:
        """Train a domain into an adapter, of which the domains in `beside` stay. It costs one single-domain training.

        Returns:
            Scores of `beside` and of the domain.
        """

    def conflicts(self, history: History, domains: Collection[str]) -> Conflicts:
        """By pair of domains, minus the cosine of their gradients in this adapter, which was trained on both."""


def starts_with_all(num_domains: int, paid: bool) -> bool:
    """Whether the first training is of all domains, not of each half. paid: all are already trained alone."""
    return paid or num_domains <= _FEW


class Former(NamedTuple):
    """An adapter of an earlier run, with its domains that are still packed. trained: None if its training no longer has
    the same inputs."""

    history: History
    names: Adapter
    trained: TrainingResult | None


class _Held(NamedTuple):
    """An adapter and the domains that stay in it, in the plan's order."""

    history: History
    names: Adapter
    trained: TrainingResult


def pack_guided(
    domains: Sequence[str],
    thresholds: Mapping[str, float],
    trainings: Trainings,
    *,
    trained_alone: Collection[str] = (),
    say: Say = lambda _: None,
    run_ahead: Callable[[Sequence[Adapter]], None] = lambda _: None,
    former: Sequence[Former] = (),
) -> Packing:
    """Pack domains at a cost of at most `BUDGET` single-domain trainings per domain.

    No attempt is made that would leave too little for training each remaining domain alone, so a domain misses its
    threshold only if it misses it alone. When the budget is spent, the search ends with the adapters that it has.

    Args:
        trained_alone: domains whose single-domain trainings exist already and cost nothing.
        run_ahead: may train these groups in parallel; each is then looked up by `together`.
        former: begin with these adapters, without merging them: only domains that they do not serve are trained.
    """
    search = _Search(domains, thresholds, trainings, trained_alone, say)
    if former:
        search.continue_from(former)
    else:
        search.train_groups(run_ahead)
    search.join_the_rest()
    if not former:
        search.merge()
    found = sorted(search.adapters, key=lambda one: domains.index(one.names[0]))
    adapters = {one.names: one.trained for one in found}
    return Packing.of(adapters, search.trials, {one.names: one.history for one in search.adapters})


class _Search:
    """adapters: with domains that meet their thresholds, or one that misses its own. left: in no adapter, nearest to
    its threshold first. spent: in single-domain trainings."""

    def __init__(
        self,
        domains: Sequence[str],
        thresholds: Mapping[str, float],
        trainings: Trainings,
        trained_alone: Collection[str],
        say: Say,
    ) -> None:
        self.trials = Trials(thresholds, say)
        self._domains = tuple(domains)
        self._thresholds = thresholds
        self._trainings = trainings
        self._alone = set(trained_alone)
        self._say = say
        self._conflicts: dict[Set, float] = {}
        self._undecided = set(domains)
        self._groups: list[Adapter] = []
        self.spent = 0.0
        self.adapters: list[_Held] = []
        self.left: list[str] = []
        self.missed: set[str] = set()

    def train_groups(self, run_ahead: Callable[[Sequence[Adapter]], None]) -> None:
        """Train all domains jointly, then those that missed their thresholds, in groups, while that is affordable.

        Where single-domain trainings are still to be paid, a failed training of all domains would leave the budget for
        them only; then the first trainings are those of two halves.
        """
        for name in [name for name in self._domains if name in self._alone]:
            if self._misses_alone(name):
                self._train_alone(name)
        first = self._sorted(self._undecided)
        paid = self._alone.issuperset(first)
        halves = [first] if starts_with_all(len(first), paid) else [first[0::2], first[1::2]]
        groups = [group for group in halves if len(group) > 1]
        self.left += [name for group in halves if len(group) == 1 for name in group]
        if len(groups) > 1:
            run_ahead(groups)
        for group, below in [(group, self._train_group(group)) for group in groups]:
            self._divide(group, below)
        self._train_the_groups()

    def continue_from(self, former: Sequence[Former]) -> None:
        """Keep the adapters of an earlier run, each with the domains that meet their thresholds; train those together
        again of which the inputs have changed.
        """
        placed = {name for one in former for name in one.names}
        changed = [self._sorted(one.names) for one in former if one.trained is None]
        for history, names, trained in former:
            below = {} if trained is None else below_threshold(trained.scores, self._thresholds)
            if below and history == History(names[:1]):  # it misses its threshold alone, so no other adapter is tried
                self._alone.update(names)
                self._train_alone(names[0])
            elif trained is not None:
                if kept := self._sorted(set(names) - below.keys()):
                    self._hold(_Held(history, kept, _scores_of(trained, kept)))
                    self._say(f"kept: {format_scores(_scores_of(trained, kept).scores, self._thresholds)}")
                self.left += self._nearest(below)
        for names in changed:
            if len(names) > 1 and self._affords(len(names)):
                self._divide(names, self._train_group(names))
            else:
                self.left += names
        self.left += [name for name in self._domains if name not in placed]
        self._train_the_groups()

    def _train_the_groups(self) -> None:
        while self._groups:
            group = max(self._groups, key=len)
            self._groups.remove(group)
            # A part of what is left in the budget: a failed group costs as much as many failed joins.
            size = next((size for size in range(len(group), 1, -1) if self._affords(size * _SHARE)), 0)
            self.left += group[size:]
            if size:
                self._divide(group[:size], self._train_group(group[:size]))

    def join_the_rest(self) -> None:
        """Train each remaining domain into an adapter that keeps all of its thresholds, or else alone."""
        for name in self.left:
            if (name in self._alone and self._misses_alone(name)) or not self._joins_any(name, self.adapters):
                self._train_alone(name)
        self.left = []

    def merge(self) -> None:
        """Merge adapters while that is affordable: two by a training of all domains, else domain by domain.

        An adapter is merged as a whole, smallest first; one that does not fit into the others stays as it is.
        """
        if len(self.adapters) == 2 and not self.missed and self._trains_all():
            return
        for small in sorted(self.adapters, key=lambda one: len(one.names))[:-1]:
            before = list(self.adapters)
            others = [one for one in before if one is not small]
            if small in before and self._could_merge(small, others):
                self.adapters, first = others, len(self.trials.steps)
                unfit = next((name for name in small.names if not self._joins_any(name, self.adapters)), None)
                if unfit is not None:
                    self.adapters = before
                    self._undo(first, small.names, unfit)

    def _undo(self, first: int, names: Adapter, unfit: str) -> None:
        """Mark the joins from step `first` on as rolled back: `unfit` of these domains fits into no other adapter."""
        steps = self.trials.steps
        if any(step.kept for step in steps[first:]):
            self._say(f"undone: no other adapter takes {unfit}, so {', '.join(names)} stay together")
        steps[first:] = [dataclasses.replace(step, kept=False) for step in steps[first:]]

    def _could_merge(self, small: _Held, others: Sequence[_Held]) -> bool:
        """Whether it is possible, as far as known, that all domains of an adapter find room in others."""
        open_ = self._open(others)
        union = {name for one in (small, *open_) for name in one.names}
        known_to_fail = len(open_) == 1 and self.trials.known_to_fail(union)
        return not self.missed & set(small.names) and not known_to_fail

    def _trains_all(self) -> bool:
        """Whether all domains fit into one adapter, which is tried if it is affordable and has not failed."""
        if frozenset(self._domains) in self.trials.failed or not self._affords(len(self._domains)):
            return False
        trained, below = self._train(self._domains, whole=True)
        if not below:
            self.adapters = [_Held(History(tuple(sorted(self._domains))), self._domains, trained)]
        return not below

    def _train_group(self, group: Adapter) -> dict[str, Score]:
        """Train a group jointly and keep the domains that meet their thresholds. Returns the others."""
        trained, below = self._train(group)
        kept = self._sorted(set(group) - below.keys())
        if kept:
            self._hold(_Held(History(tuple(sorted(group))), kept, _scores_of(trained, kept)))
        return below

    def _divide(self, group: Adapter, below: Mapping[str, Score]) -> None:
        nearest = self._nearest(below)
        if len(nearest) > 1:
            self._measure_conflicts(History(tuple(sorted(group))))
        groups = _without_conflicts(nearest, self._conflicts)
        if groups == [tuple(nearest)] and len(below) == len(group):
            groups = [tuple(nearest[0::2]), tuple(nearest[1::2])]
        self.left += [name for one in groups if len(one) == 1 for name in one]
        self._groups += [one for one in groups if len(one) > 1]

    def _train(self, group: Adapter, *, whole: bool = False) -> tuple[TrainingResult, dict[str, Score]]:
        """Train a group jointly. Returns the result and the domains that miss their thresholds. whole: as of
        `Trials.add`."""
        trained = self._trainings.together(group)
        self.spent += len(group)
        return trained, self.trials.add(group, (), trained, whole=whole)

    def _measure_conflicts(self, history: History) -> None:
        cost = self._trainings.conflict_cost * len(history.together)
        if self._affords(cost):
            self.spent += cost
            self._conflicts.update(self._trainings.conflicts(history, history.together))

    def _joins_any(self, name: str, adapters: Sequence[_Held]) -> bool:
        """Train a domain into the adapters, those without conflicts and small ones first, until one keeps it."""

        def conflict(held: _Held) -> tuple[float, int]:
            pairs = [self._conflicts.get(frozenset((name, other)), 0.0) for other in held.names]
            return max(pairs), len(held.names)

        return any(self._joins(name, held) for held in sorted(self._open(adapters), key=conflict))

    def _joins(self, name: str, held: _Held) -> bool:
        union = {*held.names, name}
        if self.trials.known_to_fail(union) or not self._affords(1):
            return False
        trained = self._trainings.join(held.history, held.names, name)
        self.spent += 1
        if below := self.trials.add((name,), held.names, trained):
            self._conflicts |= {frozenset((name, hurt)): 1.0 for hurt in below if hurt != name}
            return False
        history = held.history._replace(joins=(*held.history.joins, (held.names, name)))
        self.adapters = [one for one in self.adapters if one is not held]
        self._hold(_Held(history, self._sorted(union), trained))
        return True

    def _train_alone(self, name: str) -> None:
        trained = self._trainings.together((name,))
        self.spent += name not in self._alone
        self._alone.add(name)
        self.missed |= self.trials.add((name,), (), trained).keys()
        self._hold(_Held(History((name,)), (name,), trained))

    def _misses_alone(self, name: str) -> bool:
        return bool(below_threshold(self._trainings.together((name,)).scores, self._thresholds))

    def _hold(self, held: _Held) -> None:
        self.adapters.append(held)
        self._undecided.difference_update(held.names)

    def _affords(self, cost: float) -> bool:
        """Whether the budget also suffices to train each undecided domain alone afterwards."""
        reserve = len(self._undecided - self._alone)
        return self.spent + cost + reserve <= BUDGET * len(self._domains)

    def _open(self, adapters: Iterable[_Held]) -> list[_Held]:
        """Without those of domains that miss their thresholds alone, which take no other."""
        return [held for held in adapters if not self.missed & set(held.names)]

    def _nearest(self, below: Mapping[str, Score]) -> list[str]:
        """Domains below their thresholds, the nearest first."""
        return sorted(below, key=lambda name: (self._thresholds[name] - below[name].lower, name))

    def _sorted(self, names: Iterable[str]) -> Adapter:
        return tuple(sorted(names, key=self._domains.index))


def _without_conflicts(names: Sequence[str], conflicts: Conflicts) -> list[Adapter]:
    """Few groups without a conflict inside: a greedy colouring, most conflicts first. Groups keep the names' order."""

    def conflict(one: str, other: str) -> bool:
        return conflicts.get(frozenset((one, other)), 0.0) > _CONFLICT

    groups: list[list[str]] = []
    for name in sorted(names, key=lambda name: -sum(conflict(name, other) for other in names)):
        fitting = [group for group in groups if not any(conflict(name, other) for other in group)]
        if fitting:
            fitting[0].append(name)
        else:
            groups.append([name])
    return [tuple(sorted(group, key=names.index)) for group in groups]


def _scores_of(trained: TrainingResult, names: Collection[str]) -> TrainingResult:
    return TrainingResult({name: trained.scores[name] for name in names}, trained.seconds, trained.losses)


def trained_alone(plan: Plan, teacher_scores: Mapping[str, float | None]) -> tuple[str, ...]:
    """Domains that are trained alone in any case: for their thresholds, or for the order."""
    every = "hardest_first" in plan.order
    return tuple(
        domain.name
        for domain in plan.domains
        if every or domain.threshold_before_training(teacher_scores.get(domain.name)) is None
    )


def num_trainings(plan: Plan, alone: Sequence[str]) -> tuple[int, int]:
    """Minimum and maximum number of single-domain trainings of a run; a joint training counts once per domain.

    The minimum is for domains that fit where they are tried first. Guided packing has a budget. With the others, at
    most every domain is trained alone, and also: into the last adapter (naive); into each adapter that earlier domains
    created (first fit); or all jointly, then one fewer each time, and every pair of the remaining sets (jointly).

    Args:
        alone: domains that are trained alone in any case.
    """
    number = len(plan.domains)
    if number == 1:
        return 1, 1
    if plan.packing == "guided":
        first = 1 if starts_with_all(number, len(alone) == number) else BUDGET
        return len(alone) + number * first, len(alone) + number * BUDGET
    pairs = number * (number - 1) // 2
    if plan.packing == "jointly":
        return len(alone) + number, number + pairs + number + pairs * number
    fewest = len(alone) + len(plan.order) * number
    beside_others = number - 1 if plan.packing == "naive" else pairs
    # The first domain alone is already the first adapter.
    return fewest - (plan.domains[0].name in alone), number + beside_others * len(plan.order)
