"""Accuracy-aware packing (V-LoRA section 4.2): as few adapters as keep every domain's promise, greedily, with
rollback."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

State = TypeVar("State")


class AdapterTrainer(Protocol[State]):
    """One adapter under construction, with one head per domain trained into it."""

    def fresh(self) -> None:
        """Start a new adapter."""

    def snapshot(self) -> State:
        """Adapter and heads as they are now."""

    def restore(self, state: State) -> None:
        """Go back to a snapshot."""

    def train(self, domain: str, beside: Sequence[str]) -> None:
        """Train one more domain into the adapter; `beside` are the domains it already holds."""

    def accuracy(self, domain: str) -> float:
        """Validation accuracy of a domain the adapter holds, as a share of 1."""


@dataclasses.dataclass(frozen=True)
class PackedAdapter(Generic[State]):
    """A finished adapter: the domains in it, their validation accuracies, and its weights."""

    domains: tuple[str, ...]
    accuracies: Mapping[str, float]
    state: State


@dataclasses.dataclass(frozen=True)
class Rollback:
    """A domain that did not fit: which domains would have fallen below their thresholds, and how far."""

    domain: str
    into: tuple[str, ...]
    broken: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Packing(Generic[State]):
    """missed: domains below their threshold even alone, with the accuracy reached; each has an adapter of its own."""

    adapters: tuple[PackedAdapter[State], ...]
    rollbacks: tuple[Rollback, ...]
    missed: Mapping[str, float]


def pack(
    domains: Sequence[str],
    thresholds: Mapping[str, float],
    trainer: AdapterTrainer[State],
    say: Callable[[str], None] = lambda _: None,
) -> Packing[State]:
    """Train domain after domain into one adapter; when any in it falls below its threshold, roll back and open a new
    one.

    A domain that misses its threshold even in an adapter of its own is reported and shares an adapter with no other.
    """
    adapters: list[PackedAdapter[State]] = []
    rollbacks: list[Rollback] = []
    missed: dict[str, float] = {}
    held: tuple[str, ...] = ()
    accuracies: dict[str, float] = {}

    def close() -> None:
        nonlocal held
        if held:
            adapters.append(PackedAdapter(held, accuracies, trainer.snapshot()))
            held = ()

    trainer.fresh()
    for domain in domains:
        if held:
            before = trainer.snapshot()
            trainer.train(domain, held)
            reached = {name: trainer.accuracy(name) for name in (*held, domain)}
            broken = {name: value for name, value in reached.items() if value < thresholds[name]}
            if not broken:
                held, accuracies = (*held, domain), reached
                say(f"{domain} joins {_list(held[:-1])}: {_accuracies(reached)}")
                continue
            trainer.restore(before)
            rollbacks.append(Rollback(domain, held, broken))
            say(f"rolled back: with {domain} in it, below threshold: {_accuracies(broken)}")
            close()
            trainer.fresh()
        trainer.train(domain, ())
        reached = {domain: trainer.accuracy(domain)}
        held, accuracies = (domain,), reached
        if reached[domain] < thresholds[domain]:
            missed[domain] = reached[domain]
            say(f"{domain} misses its threshold {thresholds[domain]:.2f} even alone: {reached[domain]:.3f}")
            close()
            trainer.fresh()
        else:
            say(f"{domain} opens adapter {len(adapters) + 1}: {_accuracies(reached)}")
    close()
    return Packing(tuple(adapters), tuple(rollbacks), missed)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


def _accuracies(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())
