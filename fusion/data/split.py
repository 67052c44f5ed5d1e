"""Cutting data that comes in one piece into train, validation and test: alike in labels, apart in groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fusion.data.items import PARTS, Part
from fusion.plan.schema import SplitPlan


def split(labels: Sequence[Sequence[int]], clusters: Sequence[int], shares: SplitPlan, seed: int) -> list[Part]:
    """Which part each item goes to. labels: those an item shows, if any. Items of one cluster stay together.

    Deterministic for a seed. Each label's items are shared out by themselves (an item with several labels as one of the
    rarest of them), first one group to each part, then to whichever part lacks most.
    """
    rarity = Counter(label for shown in labels for label in shown)
    together: dict[int, list[int]] = {}
    for item, number in enumerate(clusters):
        together.setdefault(number, []).append(item)
    strata: dict[int, list[list[int]]] = {}
    for cluster in together.values():
        shown = {label for item in cluster for label in labels[item]}
        rarest = min(shown, key=lambda label: (rarity[label], label), default=-1)
        strata.setdefault(rarest, []).append(cluster)
    wanted = {"train": 1 - shares.validation - shares.test, "validation": shares.validation, "test": shares.test}
    parts: list[Part] = ["train"] * len(labels)
    for label, stratum in sorted(strata.items()):
        rng = np.random.default_rng([seed, label + 1])
        size = sum(map(len, stratum))
        lacking = {part: wanted[part] * size for part in PARTS}
        empty = list(PARTS)
        for place in rng.permutation(len(stratum)):
            part = empty.pop(0) if empty else max(PARTS, key=lambda part: lacking[part])
            lacking[part] -= len(stratum[place])
            for item in stratum[place]:
                parts[item] = part
    return parts


def clusters_of(groups: Sequence[Sequence[str]]) -> list[int]:
    """For every item, the first item that it has a group in common with, also by way of others."""
    parents = list(range(len(groups)))

    def root(item: int) -> int:
        while parents[item] != item:
            parents[item] = parents[parents[item]]
            item = parents[item]
        return item

    first: dict[str, int] = {}
    for item, names in enumerate(groups):
        for name in names:
            one, other = sorted((root(item), root(first.setdefault(name, item))))
            parents[other] = one
    return [root(item) for item in range(len(groups))]
