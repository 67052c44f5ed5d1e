"""Which strategy serves a site in a step: worked out once per step and site class, then looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from atmm import reference, strategies
from atmm.segments import SegmentPlan
from atmm.sites import Site

Strategy = Callable[[torch.Tensor, torch.Tensor, Site, SegmentPlan], None]

STRATEGIES: dict[str, Strategy] = {
    "reference": reference.add_delta,
    "loop": strategies.loop,
    "stacked": strategies.stacked,
    "batched": strategies.batched,
}

_WIDEST_STACK = 256  # columns up to which multiplying what the mask then drops costs less than more calls (measured)

_forced: str | None = None


@contextmanager
def force(name: str) -> Iterator[None]:
    """Use one strategy wherever it is able to, for tests and measurements. Raises ValueError for an unknown name."""
    global _forced
    if name not in STRATEGIES:
        raise ValueError(f"strategy is {name!r}; known: {', '.join(STRATEGIES)}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def able(name: str, site: Site, plan: SegmentPlan) -> bool:
    """Whether a strategy can serve this site with this plan."""
    packed = site.group.packed
    if name in ("loop", "reference"):
        return True
    if packed is None or not plan.keys <= set(packed.keys):
        return False
    if name == "stacked":
        return True
    in_order = tuple(lane.key for lane in plan.lanes) == packed.keys
    signs = all(lane.sign == 1.0 for lane in plan.lanes)
    return packed.equal_rank and in_order and signs and plan.even and plan.num_tokens % len(plan.lanes) == 0


def choose(site: Site, plan: SegmentPlan) -> Strategy:
    """The strategy for this site in this step."""
    packed = site.group.packed
    key: Any = (None if packed is None else packed.layout, site.place, site.d_in, site.d_out, _forced)
    strategy = plan.memo.get(key)
    if strategy is None:
        strategy = plan.memo[key] = STRATEGIES[_rule(site, plan)]
    return strategy


def _rule(site: Site, plan: SegmentPlan) -> str:
    if _forced is not None and able(_forced, site, plan):
        return _forced
    packed = site.group.packed
    if packed is None or len(plan.lanes) == 1 or not able("stacked", site, plan):
        return "loop"
    start, stop = packed.columns[site.place]
    if stop - start <= _WIDEST_STACK:
        return "stacked"
    return "batched" if able("batched", site, plan) else "loop"
