"""Accuracy-aware packing (V-LoRA section 4.2): as few adapters as keep every domain's promise.

An adapter is named by the domains trained into it, in that order. Training is deterministic, so the name says
everything: going back to an earlier adapter is to name it again, and nothing here ever holds weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

Adapter = tuple[str, ...]
_LONGEST_NAME = 120  # characters


class Score(NamedTuple):
    """value: the domain's metric on validation data, 0 to 1. lower: its lower confidence bound."""

    value: float
    lower: float


@dataclasses.dataclass(frozen=True)
class Trained:
    """What is known of an adapter: the score of every domain in it, the seconds its last training took, and its losses
    from beginning to end."""

    scores: Mapping[str, Score]
    seconds: float
    losses: tuple[float, ...] = ()


Train = Callable[[Adapter], Trained]
"""Train the last domain of an adapter into the adapter of those before it, or look up what came of it."""
TrainTogether = Callable[[frozenset[str]], Trained]
"""Train domains into one adapter at once, or look up what came of it."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One training of a packing: `domains` at once into the adapter `into` (empty: a new one), and whether it stayed.

    broken: the domains that would have missed their thresholds, with their scores.
    """

    domains: tuple[str, ...]
    into: Adapter
    trained: Trained
    broken: Mapping[str, Score]
    kept: bool


@dataclasses.dataclass(frozen=True)
class Packing:
    """adapters: as trained, with their scores. missed: domains below their threshold in the adapter they are in.
    margin: the smallest distance from a bound to its threshold, over domains that keep theirs."""

    adapters: Mapping[Adapter, Trained]
    steps: tuple[Step, ...]
    missed: Mapping[str, Score]
    margin: float

    @classmethod
    def of(
        cls,
        adapters: Mapping[Adapter, Trained],
        steps: Sequence[Step],
        missed: Mapping[str, Score],
        thresholds: Mapping[str, float],
    ) -> Packing:
        margins = [
            score.lower - thresholds[name]
            for trained in adapters.values()
            for name, score in trained.scores.items()
            if name not in missed
        ]
        return cls(dict(adapters), tuple(steps), dict(missed), min(margins, default=0.0))

    @property
    def rollbacks(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if not step.kept)

    @property
    def rank(self) -> tuple[int, int, float]:
        """Less is better: first promises, then adapters, then room to spare."""
        return len(self.missed), len(self.adapters), -self.margin


def pack(
    domains: Sequence[str],
    thresholds: Mapping[str, float],
    train: Train,
    *,
    say: Callable[[str], None] = lambda _: None,
    best: Packing | None = None,
) -> Packing | None:
    """First fit: each domain into the first adapter in which every promise still holds by its lower bound, else into a
    new one.

    A domain that misses its threshold even alone is reported, and shares its adapter with no other. None as soon as
    the packing is sure to be worse than `best`.
    """
    adapters: dict[Adapter, Trained] = {}
    steps: list[Step] = []
    missed: dict[str, Score] = {}
    for domain in domains:
        for held in [adapter for adapter in adapters if not missed.keys() & set(adapter)]:
            trained = train((*held, domain))
            broken = broken_in(trained.scores, thresholds)
            steps.append(Step((domain,), held, trained, broken, kept=not broken))
            if not broken:
                # In the place of the one it grew from: adapters stay in the order in which they were opened.
                adapters = {
                    (*held, domain) if a == held else a: trained if a == held else t for a, t in adapters.items()
                }
                say(f"{domain} joins {_list(held)}: {told(trained.scores, thresholds)}")
                break
            say(f"rolled back: with {domain} in {_list(held)}, below threshold: {told(broken, thresholds)}")
        else:
            trained = train((domain,))
            broken = broken_in(trained.scores, thresholds)
            steps.append(Step((domain,), (), trained, broken, kept=True))
            adapters[(domain,)] = trained
            missed.update(broken)
            say(
                f"{domain} misses its threshold even alone: {told(broken, thresholds)}"
                if broken
                else f"{domain} opens adapter {len(adapters)}: {told(trained.scores, thresholds)}"
            )
        if best is not None and (len(missed), len(adapters)) > best.rank[:2]:
            return None
    return Packing.of(adapters, steps, missed, thresholds)


def pack_best(
    orders: Iterable[Sequence[str]],
    thresholds: Mapping[str, float],
    train: Train,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> Packing:
    """The best packing of several candidate orders; which comes first changes nothing.

    Orders that begin alike share their trainings, and one that is sure to lose is given up.
    """
    best: Packing | None = None
    for order in sorted(set(map(tuple, orders))):
        packing = pack(order, thresholds, train, say=say, best=best)
        if packing is not None and (best is None or packing.rank < best.rank):
            best = packing
    assert best is not None, "at least one order is needed"
    return best


def pack_in_sequence(
    domains: Sequence[str],
    thresholds: Mapping[str, float],
    train: Train,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> Packing:
    """The paper's algorithm as it stands (section 4.2.1): one adapter takes domain after domain until any in it falls
    below its threshold; then it is rolled back and closed, and a new one learns the last domain.

    The paper looks at the measured value: give `by_value(train)` for that.
    """
    closed: dict[Adapter, Trained] = {}
    steps: list[Step] = []
    held: Adapter = ()
    current: Trained | None = None
    for domain in domains:
        trained = train((*held, domain))
        broken = broken_in(trained.scores, thresholds)
        steps.append(Step((domain,), held, trained, broken, kept=not (held and broken)))
        if current is not None and broken:
            say(f"rolled back: with {domain} in {_list(held)}, below threshold: {told(broken, thresholds)}")
            closed[held] = current
            held = ()
            trained = train((domain,))
            steps.append(Step((domain,), (), trained, broken_in(trained.scores, thresholds), kept=True))
        held, current = (*held, domain), trained
        say(f"{_list(held)}: {told(trained.scores, thresholds)}")
    if current is not None:
        closed[held] = current
    missed = {
        name: score for trained in closed.values() for name, score in broken_in(trained.scores, thresholds).items()
    }
    return Packing.of(closed, steps, missed, thresholds)


def by_value(train: Train) -> Train:
    """The same trainings, judged by the measured values as if these were certain."""

    def trained(adapter: Adapter) -> Trained:
        found = train(adapter)
        values = {name: Score(score.value, score.value) for name, score in found.scores.items()}
        return dataclasses.replace(found, scores=values)

    return trained


def names_of(adapters: Iterable[Adapter]) -> dict[Adapter, str]:
    """What their folders are called, and what they are served as: their domains. The first of them and a hash where all
    would be longer than a file system takes, or mean another adapter, too: (a, b-c) and (a-b, c)."""
    plain = {adapter: "-".join(adapter) for adapter in adapters}
    # As a file system that does not tell cases apart sees them.
    count = Counter(name.casefold() for name in plain.values())
    return {
        adapter: name if len(name) <= _LONGEST_NAME and count[name.casefold()] == 1 else _hashed(name, adapter)
        for adapter, name in plain.items()
    }


def _hashed(name: str, adapter: Adapter) -> str:
    # No domain's name has a comma.
    return f"{name[:80]}-{hashlib.sha256(','.join(adapter).encode()).hexdigest()[:12]}"


def broken_in(scores: Mapping[str, Score], thresholds: Mapping[str, float]) -> dict[str, Score]:
    """Those whose lower bound is below their threshold."""
    return {name: score for name, score in scores.items() if score.lower < thresholds[name]}


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


def told(scores: Mapping[str, Score], thresholds: Mapping[str, float]) -> str:
    """Scores beside their thresholds, for people; lower bounds where a confidence is set, which makes them differ."""
    bounds = {name: f"lower bound {score.lower:.3f}, " for name, score in scores.items() if score.lower != score.value}
    return ", ".join(
        f"{name} {score.value:.3f} ({bounds.get(name, '')}threshold {thresholds[name]:.3f})"
        for name, score in scores.items()
    )
