"""Accuracy-aware packing (V-LoRA section 4.2): the fewest adapters in which every domain meets its threshold.

An adapter is identified by the domains trained into it, in order. Training is deterministic, so the identifier
determines the adapter: a rollback selects the earlier identifier again, and this module never stores weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Adapter = tuple[str, ...]


class History(NamedTuple):
    """How an adapter was trained: domains `together`, sorted; then `joins`, each a domain beside those that stayed."""

    together: Adapter
    joins: tuple[tuple[Adapter, str], ...] = ()

    @classmethod
    def in_sequence(cls, adapter: Adapter) -> History:
        """One domain after the other, each beside all before it."""
        return cls(adapter[:1], tuple((adapter[:place], adapter[place]) for place in range(1, len(adapter))))


class Score(NamedTuple):
    """value: the domain's metric on validation data, 0 to 1. lower: its lower confidence bound."""

    value: float
    lower: float


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Result of training an adapter.

    scores: validation score of every domain in it. seconds: duration of its last training. losses: from the start to
    the end of that training.
    """

    scores: Mapping[str, Score]
    seconds: float
    losses: tuple[float, ...] = ()


Train = Callable[[Adapter], TrainingResult]
"""Train the last domain of an adapter into the adapter of the domains before it, or look up the result."""
TrainTogether = Callable[[frozenset[str]], TrainingResult]
"""Train domains jointly into one adapter, or look up the result."""
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Step:
    """One training of a packing: `domains` jointly into the adapter `into` (empty: a new one).

    broken: the domains that miss their thresholds, with their scores. kept: whether the training was kept; one that
    breaks no threshold is rolled back where the merge of two adapters fails later.
    """

    domains: tuple[str, ...]
    into: Adapter
    trained: TrainingResult
    broken: Mapping[str, Score]
    kept: bool

    @property
    def removed(self) -> tuple[str, ...]:
        """The domains that leave the adapter of a kept training, because they miss their thresholds beside others."""
        return tuple(self.broken) if self.kept and len(self.trained.scores) > 1 else ()


@dataclasses.dataclass(frozen=True)
class Packing:
    """Result of packing.

    adapters: as trained, with their scores. missed: domains below their threshold in their adapter. margin: the
    smallest distance from a bound to its threshold, over domains that meet theirs. histories: how each adapter was
    trained.
    """

    adapters: Mapping[Adapter, TrainingResult]
    steps: tuple[Step, ...]
    missed: Mapping[str, Score]
    margin: float
    histories: Mapping[Adapter, History]

    @classmethod
    def of(
        cls,
        adapters: Mapping[Adapter, TrainingResult],
        trials: Trials,
        histories: Mapping[Adapter, History] | None = None,
    ) -> Packing:
        """histories: None if all domains were trained in sequence."""
        if histories is None:
            histories = {adapter: History.in_sequence(adapter) for adapter in adapters}
        scores = {name: score for trained in adapters.values() for name, score in trained.scores.items()}
        missed = below_threshold(scores, trials.thresholds)
        margins = [score.lower - trials.thresholds[name] for name, score in scores.items() if name not in missed]
        return cls(dict(adapters), tuple(trials.steps), missed, min(margins, default=0.0), dict(histories))

    @property
    def rollbacks(self) -> tuple[Step, ...]:
        """Trainings that were not kept, or of which only the domains that meet their thresholds stay."""
        return tuple(step for step in self.steps if not step.kept or step.removed)

    @property
    def rank(self) -> tuple[int, int, float]:
        """Lower is better: missed thresholds first, then number of adapters, then margin."""
        return len(self.missed), len(self.adapters), -self.margin


class Trials:
    """The trainings of a packing, in order; each prints a line."""

    def __init__(self, thresholds: Mapping[str, float], say: Say) -> None:
        self.thresholds, self.say = thresholds, say
        self.steps: list[Step] = []
        self.failed: list[frozenset[str]] = []

    def known_to_fail(self, names: Collection[str]) -> bool:
        """Whether a set among these domains missed a threshold in one adapter."""
        return any(failed <= set(names) for failed in self.failed)

    def add(self, domains: Adapter, into: Adapter, trained: TrainingResult, *, whole: bool = True) -> dict[str, Score]:
        """Record a training of `domains` into an adapter; return the domains that miss their thresholds.

        Args:
            whole: the training is kept only if no domain misses its threshold; else also if some of `domains` do not.
                A new adapter of one domain is always kept.
        """
        broken, alone = below_threshold(trained.scores, self.thresholds), not into and len(domains) == 1
        stays = [name for name in domains if name not in broken] if not (broken and whole) else []
        self.steps.append(Step(domains, into, trained, broken, kept=alone or bool(stays)))
        if broken and not alone:
            self.failed.append(frozenset((*domains, *into)))
        scores, low = (format_scores(each, self.thresholds) for each in (trained.scores, broken))
        names = ", ".join(domains)
        if into and broken:
            self.say(f"rolled back: with {names} in {', '.join(into)}, below threshold: {low}")
        elif into:
            self.say(f"{names} joins {', '.join(into)}: {scores}")
        elif alone:
            self.say(f"{names} {'misses its threshold even alone' if broken else 'alone'}: {scores}")
        elif broken:
            kept = ", ".join(stays) or "none"
            self.say(f"{names} do not fit into one adapter, below threshold: {low}; kept in it: {kept}")
        else:
            self.say(f"{names} in one adapter: {scores}")
        return broken


def pack(
    domains: Sequence[str],
    thresholds: Mapping[str, float],
    train: Train,
    *,
    last_only: bool = False,
    say: Say = lambda _: None,
    best: Packing | None = None,
) -> Packing | None:
    """First fit: each domain goes into the first adapter in which every domain's lower bound still meets its threshold,
    else into a new one.

    A domain that misses its threshold even alone is reported, and its adapter takes no other domain.

    Args:
        last_only: `pack_in_sequence`.
        best: return None as soon as the packing is certain to be worse than this one.
    """
    trials, missed = Trials(thresholds, say), set[str]()
    adapters: dict[Adapter, TrainingResult] = {}
    for domain in domains:
        open_ = [*adapters][-1:] if last_only else [adapter for adapter in adapters if not missed & set(adapter)]
        for held in open_:
            trained = train((*held, domain))
            if not trials.add((domain,), held, trained):
                # Replaces the adapter that it extends: adapters stay in the order in which they were created.
                adapters = {
                    (*held, domain) if a == held else a: trained if a == held else t for a, t in adapters.items()
                }
                break
        else:
            adapters[(domain,)] = trained = train((domain,))
            missed |= trials.add((domain,), (), trained).keys()
        if best is not None and (len(missed), len(adapters)) > best.rank[:2]:
            return None
    return Packing.of(adapters, trials)


def pack_best(
    orders: Iterable[Sequence[str]], thresholds: Mapping[str, float], train: Train, *, say: Say = lambda _: None
) -> Packing:
    """The best first fit of several candidate orders; their sequence does not matter.

    Orders with a common prefix share its trainings, and an order that cannot win any more is abandoned.
    """
    best: Packing | None = None
    for order in sorted(set(map(tuple, orders))):
        packing = pack(order, thresholds, train, say=say, best=best)
        if packing is not None and (best is None or packing.rank < best.rank):
            best = packing
    assert best is not None, "at least one order is needed"
    return best


def pack_in_sequence(
    domains: Sequence[str], thresholds: Mapping[str, float], train: Train, *, say: Say = lambda _: None
) -> Packing:
    """The paper's algorithm (section 4.2.1): one adapter takes domain after domain until one of them falls below its
    threshold; then it is rolled back and closed, and a new adapter learns the last domain. The paper compares the
    measured value; pass `by_value(train)` for that."""
    packing = pack(domains, thresholds, train, last_only=True, say=say)
    assert packing is not None, "there is no better one"
    return packing


def by_value(train: Train) -> Train:
    """The same trainings, with measured values as lower bounds."""

    def trained(adapter: Adapter) -> TrainingResult:
        found = train(adapter)
        values = {name: Score(one.value, one.value) for name, one in found.scores.items()}
        return dataclasses.replace(found, scores=values)

    return trained


def names_of(
    adapters: Iterable[Adapter], name: str, former: Mapping[str, Adapter] = {}, reserved: Collection[str] = ()
) -> dict[Adapter, str]:
    """Names of folders, which are also the served names: NAME-1, NAME-2, ...

    An adapter keeps the name of the adapter of an earlier run with which it shares most domains.

    Args:
        former: domains of the adapters of the earlier run, by their names.
        reserved: names that no adapter gets.
    """
    ours = tuple(adapters)
    pattern = re.compile(rf"{re.escape(name)}-[1-9][0-9]*")
    shared = [
        (len(set(adapter) & set(domains)), adapter, old)
        for adapter in ours
        for old, domains in former.items()
        if pattern.fullmatch(old) and old not in reserved
    ]
    names: dict[Adapter, str] = {}
    for count, adapter, old in sorted(shared, key=lambda each: -each[0]):
        if count and adapter not in names and old not in names.values():
            names[adapter] = old
    free = (number for count in itertools.count(1) if (number := f"{name}-{count}") not in (*former, *reserved))
    return {adapter: names.get(adapter) or next(free) for adapter in ours}


def below_threshold(scores: Mapping[str, Score], thresholds: Mapping[str, float]) -> dict[str, Score]:
    return {name: score for name, score in scores.items() if score.lower < thresholds[name]}


def format_scores(scores: Mapping[str, Score], thresholds: Mapping[str, float]) -> str:
    """Format scores with their thresholds, and with lower bounds if a confidence is set."""
    bounds = {name: f"lower bound {score.lower:.3f}, " for name, score in scores.items() if score.lower != score.value}
    return ", ".join(
        f"{name} {score.value:.3f} ({bounds.get(name, '')}threshold {thresholds[name]:.3f})"
        for name, score in scores.items()
    )


def at_random(domains: Sequence[str], seed: int) -> tuple[str, ...]:
    return tuple(domains[place] for place in np.random.default_rng(seed).permutation(len(domains)))


def by_similarity(features: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Start at the first domain; each next one is the most similar by the cosine of mean features [hidden]."""
    # The mean over all domains is subtracted, since it would dominate their differences.
    rows = np.stack(list(features.values()))
    rows = rows - rows.mean(0)
    units = dict(zip(features, rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12), strict=True))
    order = [next(iter(features))]
    while len(order) < len(units):
        left = [name for name in units if name not in order]
        order.append(max(left, key=lambda name: float(units[name] @ units[order[-1]])))
    return tuple(order)
