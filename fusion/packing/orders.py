"""Orders in which domains are packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def at_random(domains: Sequence[str], seed: int) -> tuple[str, ...]:
    return tuple(domains[place] for place in np.random.default_rng(seed).permutation(len(domains)))


def hardest_first(alone: Mapping[str, float]) -> tuple[str, ...]:
    """Sort by the accuracy of each domain in an adapter of its own, lowest first."""
    return tuple(sorted(alone, key=lambda name: alone[name]))


def by_similarity(features: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Start at the first domain; each next one is the most similar by the cosine of mean features [hidden]."""
    # The mean over all domains is subtracted, since it would dominate their differences.
    mean = np.mean(list(features.values()), 0)
    units = {name: _unit(vector - mean) for name, vector in features.items()}
    order = [next(iter(features))]
    while len(order) < len(units):
        left = [name for name in units if name not in order]
        order.append(max(left, key=lambda name: float(units[name] @ units[order[-1]])))
    return tuple(order)


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / max(float(np.linalg.norm(vector)), 1e-12)
