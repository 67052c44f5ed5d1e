"""The strategy for steps that decode, compute prompts, or both, from adapters where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atmm.cpu.lanes import Scattered, serves
from atmm.layers import Packed, Site, SiteGroup
from atmm.segments import Lane
from atmm.strategies.loop import Loop

# Tokens of a lane up to which it costs the compiled kernels less to read its adapter's rows anew for each than it costs
# two products to be called (docs/decisions.md, 2026-11-22).
SHORT = 8


class Divided:
    """Short lanes by the compiled kernels, all in one call, and long ones by two products each.

    The kernels pass over every token between the first short lane and the last: batches are best sorted by the lengths
    of their lanes. Only where `serves` of the compiled kernels holds.
    """

    refill = None

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._short = Scattered([lane for lane in lanes if not _is_long(lane)])
        self._long = Loop(tuple(filter(_is_long, lanes)))
        self.adds_transposed = self._long.adds_transposed

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        self._long.check((site,), x)
        self._short(y, x, site, packed)
        self._long(y, x, site, packed)

    def add_all(self, y: Tensor, x: Tensor, group: SiteGroup) -> None:
        """For the whole group at once. y: [T, sum of d_out], the sites' outputs side by side."""
        self._long.check(group.sites, x)
        self._short.add_all(y, x, group)
        self._long.add_all(y, x, group)


def longest_short_lane(device: torch.device, dtype: torch.dtype) -> int:
    """Most tokens of a lane that is computed as short ones are; 0 where all are computed alike."""
    return SHORT if serves(device, dtype) else 0


def gains_from_copies(lanes: Sequence[Lane], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed copies of their adapters could make such lanes faster: of long ones, which then share products."""
    return not serves(device, dtype) or sum(map(_is_long, lanes)) > 1


def divides(lanes: Sequence[Lane]) -> bool:
    """Whether some of the lanes are short and others long: elsewhere this is one way or the other."""
    return 0 < sum(map(_is_long, lanes)) < len(lanes)


def _is_long(lane: Lane) -> bool:
    return lane.stop - lane.start > SHORT
