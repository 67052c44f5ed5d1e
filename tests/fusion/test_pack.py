"""Packing, against a trainer whose accuracies are written down beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from fusion.pack import pack


class Scripted:
    """Accuracy of a domain depends on which domains share the adapter, as told by `table`."""

    def __init__(self, table: dict[tuple[str, frozenset[str]], float], default: float = 0.9) -> None:
        self.table = table
        self.default = default
        self.held: tuple[str, ...] = ()
        self.trainings: list[tuple[str, tuple[str, ...]]] = []

    def fresh(self) -> None:
        self.held = ()

    def snapshot(self) -> tuple[str, ...]:
        return self.held

    def restore(self, state: tuple[str, ...]) -> None:
        self.held = state

    def train(self, domain: str, beside: Sequence[str]) -> None:
        assert tuple(beside) == self.held
        self.trainings.append((domain, tuple(beside)))
        self.held = (*self.held, domain)

    def accuracy(self, domain: str) -> float:
        assert domain in self.held
        return self.table.get((domain, frozenset(self.held)), self.default)


THRESHOLDS = {"a": 0.8, "b": 0.8, "c": 0.8}


def test_everything_that_fits_shares_one_adapter() -> None:
    packing = pack(("a", "b", "c"), THRESHOLDS, Scripted({}))
    assert [adapter.domains for adapter in packing.adapters] == [("a", "b", "c")]
    assert not packing.rollbacks and not packing.missed


def test_a_domain_that_harms_another_is_rolled_back_into_an_adapter_of_its_own() -> None:
    trainer = Scripted({("a", frozenset("ab")): 0.5})
    packing = pack(("a", "b", "c"), THRESHOLDS, trainer)
    assert [adapter.domains for adapter in packing.adapters] == [("a",), ("b", "c")]
    assert packing.adapters[0].state == ("a",)
    (rollback,) = packing.rollbacks
    assert (rollback.domain, rollback.into, rollback.broken) == ("b", ("a",), {"a": 0.5})
    # Rolled back and trained again from nothing, not on top of what failed.
    assert trainer.trainings == [("a", ()), ("b", ("a",)), ("b", ()), ("c", ("b",))]


def test_a_domain_that_is_harmed_itself_is_rolled_back_too() -> None:
    packing = pack(("a", "b"), THRESHOLDS, Scripted({("b", frozenset("ab")): 0.79}))
    assert [adapter.domains for adapter in packing.adapters] == [("a",), ("b",)]
    assert packing.rollbacks[0].broken == {"b": 0.79}


def test_a_domain_that_fails_alone_is_reported_and_poisons_nothing() -> None:
    hopeless = {("b", frozenset("ab")): 0.3, ("b", frozenset("b")): 0.4}
    packing = pack(("a", "b", "c"), THRESHOLDS, Scripted(hopeless))
    assert packing.missed == {"b": 0.4}
    assert [adapter.domains for adapter in packing.adapters] == [("a",), ("b",), ("c",)]


def test_exactly_at_the_threshold_is_kept() -> None:
    packing = pack(("a", "b"), THRESHOLDS, Scripted({}, default=0.8))
    assert [adapter.domains for adapter in packing.adapters] == [("a", "b")]


def test_accuracies_are_those_of_the_finished_adapter() -> None:
    packing = pack(("a", "b"), THRESHOLDS, Scripted({("a", frozenset("a")): 0.99, ("a", frozenset("ab")): 0.85}))
    assert packing.adapters[0].accuracies == {"a": 0.85, "b": 0.9}
