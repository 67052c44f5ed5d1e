"""Splitting of data into train, validation and test, stratified by label, with each group in one part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fusion.data.samples import Target
from fusion.data.targets import labels_shown
from fusion.plan.data_formats import SplitPlan
from vlora.plan_files.errors import PlanErrors
from vlora.training.records import PARTS, Part


def divide(
    task: str,
    samples: Sequence[tuple[Part | None, Target]],
    clusters: Sequence[int],
    shares: SplitPlan,
    seed: int,
    errors: PlanErrors,
) -> Sequence[Part | None]:
    """The part of each sample: as the data says; parts that it lacks are split off from its training samples."""
    given = [part for part, _ in samples]
    lacking = [part for part in PARTS if part not in given]
    if not lacking or not given:
        return given
    wanted: dict[Part, float] = {part: getattr(shares, part) for part in lacking if part != "train"}
    wanted["train"] = 1 - sum(wanted.values())
    divided = [place for place, part in enumerate(given) if part in (None, "train")]
    found = split(
        [labels_shown(task, samples[place][1]) for place in divided],
        [clusters[place] for place in divided],
        wanted,
        seed,
    )
    parts = list(given)
    for place, part in zip(divided, found, strict=True):
        parts[place] = part
    counts = Counter(found)
    names = " and ".join(f"{part} ({counts[part]})" for part in PARTS if part != "train" and part in wanted)
    source = "train" if len(lacking) < len(PARTS) else f"all {len(given)} samples"
    errors.note(
        f"{names} split off from {source} with seed {seed}: in proportion of labels, equal pictures and groups together"
    )
    return parts


def split(
    labels: Sequence[Sequence[int]], clusters: Sequence[int], wanted: Mapping[Part, float], seed: int
) -> list[Part]:
    """Assign each item to a part. Deterministic for a seed.

    Each label's items are distributed separately (an item with several labels counts for the rarest of them): first one
    cluster to each part, then each to the part that is furthest below its share.

    Args:
        labels: the labels of each item, if any.
        clusters: the cluster of each item; items of one cluster stay together.
        wanted: the share of each part; together 1.
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
    names = [part for part in PARTS if part in wanted]
    parts: list[Part] = ["train"] * len(labels)
    for label, stratum in sorted(strata.items()):
        rng = np.random.default_rng([seed, label + 1])
        size = sum(map(len, stratum))
        lacking = {part: wanted[part] * size for part in names}
        empty = list(names)
        for place in rng.permutation(len(stratum)):
            part = empty.pop(0) if empty else max(names, key=lambda part: lacking[part])
            lacking[part] -= len(stratum[place])
            for item in stratum[place]:
                parts[item] = part
    return parts


def clusters_of(groups: Sequence[Sequence[str]]) -> list[int]:
    """For every item, the first item that it shares a group with, directly or through other items."""
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
