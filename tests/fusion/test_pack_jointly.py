"""Packing by joint training, against scripted conflicts and the exhaustive optimum."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection

import hypothesis.strategies as st
from hypothesis import given, settings

from fusion.packing.algorithm import Score, TrainingResult
from fusion.packing.joint import pack_jointly
from fusion.packing.oracle import Oracle
from tests.example_counts import scaled

NAMES = "abcdef"
THRESHOLDS = dict.fromkeys(NAMES, 0.8)


class Conflicts:
    """A domain of a set scores 0.5 if the set contains a whole conflicting group, and 0.9 otherwise."""

    def __init__(self, *groups: Collection[str]) -> None:
        self.groups = [frozenset(group) for group in groups]
        self.trained: list[frozenset[str]] = []

    def __call__(self, together: frozenset[str]) -> TrainingResult:
        self.trained.append(together)
        hurt = frozenset[str]().union(*(group for group in self.groups if group <= together))
        return TrainingResult(
            {name: Score(value, value) for name in together for value in [0.5 if name in hurt else 0.9]}, 1.0
        )


def sets(domains: str, train: Conflicts) -> list[str]:
    packing = pack_jointly(tuple(domains), THRESHOLDS, train)
    assert len(train.trained) == len(set(train.trained)) == len(packing.steps)
    assert sorted(name for adapter in packing.adapters for name in adapter) == sorted(domains)
    for adapter, trained in packing.adapters.items():
        assert set(trained.scores) == set(adapter)
    return ["".join(adapter) for adapter in packing.adapters]


def test_domains_that_fit_together_take_one_training() -> None:
    train = Conflicts()
    assert sets("abcdef", train) == ["abcdef"]
    assert len(train.trained) == 1


def test_domains_below_their_thresholds_are_split_off_and_merged() -> None:
    train = Conflicts("ab")
    assert sets("abcd", train) == ["acd", "b"]
    # All; the unaffected ones; the two in conflict, one at a time; then a with the unaffected ones.
    assert ["".join(sorted(names)) for names in train.trained] == ["abcd", "ab", "a", "b", "cd", "acd"]


def test_adapters_and_their_domains_are_in_the_plans_order() -> None:
    assert sets("dbca", Conflicts("ab")) == ["dca", "b"]
    assert sets("badc", Conflicts("ab")) == ["b", "adc"]


def test_a_domain_that_fails_alone_is_reported_and_affects_no_other() -> None:
    packing = pack_jointly("abc", THRESHOLDS, Conflicts("b"))
    assert packing.missed == {"b": Score(0.5, 0.5)}
    assert list(packing.adapters) == [("a", "c"), ("b",)]
    assert packing.margin > 0


@settings(max_examples=scaled(60))
@given(st.lists(st.sets(st.sampled_from(NAMES), min_size=1, max_size=3), max_size=5))
def test_every_reachable_threshold_is_met(groups: list[set[str]]) -> None:
    train = Conflicts(*groups)
    packing = pack_jointly(tuple(NAMES), THRESHOLDS, train)
    hopeless = {name for group in groups if len(group) == 1 for name in group}
    assert set(packing.missed) == hopeless
    for adapter, trained in packing.adapters.items():
        assert len(adapter) == 1 or all(score.lower >= 0.8 for score in trained.scores.values())
    # No two of them could be merged.
    for one, other in itertools.combinations(packing.adapters, 2):
        union = frozenset(one + other)
        assert hopeless & union or any(group <= union for group in train.groups)


def more_than_needed(domains: str, *groups: Collection[str]) -> int:
    """Adapters beyond the exhaustive optimum."""
    best = Oracle(tuple(domains), THRESHOLDS, Conflicts(*groups)).optimum()
    return len(pack_jointly(tuple(domains), THRESHOLDS, Conflicts(*groups)).adapters) - len(best.adapters)


def test_with_conflicts_of_five_domains_at_most_one_adapter_too_many() -> None:
    pairs = list(itertools.combinations("abcde", 2))
    graphs = [[pair for place, pair in enumerate(pairs) if bits >> place & 1] for bits in range(1 << len(pairs))]
    found = Counter(more_than_needed("abcde", *graph) for graph in graphs)
    assert found.keys() == {0, 1} and found[0] > 0.85 * len(graphs)


def test_with_six_domains_it_may_be_two_too_many() -> None:
    """Merging the smallest first can be suboptimal: in 18 of all 32,768 graphs on six domains."""
    assert more_than_needed("abcdef", "af", "bc", "be", "cf", "de", "ef") == 2
