"""Orders of packing."""

from __future__ import annotations

import numpy as np

from fusion.packing.orders import at_random, by_similarity, hardest_first


def test_random_orders_depend_on_the_seed() -> None:
    names = ("a", "b", "c", "d", "e")
    assert at_random(names, 3) == at_random(names, 3)
    assert sorted(at_random(names, 3)) == sorted(names)
    assert len({at_random(names, seed) for seed in range(20)}) > 10


def test_the_hardest_comes_first() -> None:
    assert hardest_first({"a": 0.9, "b": 0.5, "c": 0.7}) == ("b", "c", "a")


def test_similar_domains_follow_each_other() -> None:
    common = np.array([100.0, 0.0])  # common to all pictures, so without information
    angles = {"a": 0.0, "b": 180.0, "c": 60.0, "d": 130.0}
    turns = {name: np.radians(angle) for name, angle in angles.items()}
    features = {name: common + np.array([np.cos(turn), np.sin(turn)]) for name, turn in turns.items()}
    assert by_similarity(features) == ("a", "c", "d", "b")
