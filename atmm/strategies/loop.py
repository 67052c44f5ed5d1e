"""The strategy that works everywhere: two products per lane, from the sites' own factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from atmm.layers import Factors, Packed, Site, SiteGroup, check_reads
from atmm.matmul import add_product, widened
from atmm.segments import Lane


class Loop:
    """Two products per lane. The factors must have been checked before, by packing or by `check`."""

    begin = None
    refill = None

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lanes)
        self.adds_transposed = not lanes  # the products need row-major outputs
        self._keys = frozenset(lane.key for lane in lanes)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        factors_of = site.factors
        for key, start, stop, sign in self._lanes:
            factors = factors_of.get(key)
            if factors is not None:
                _add_lane(y[start:stop], x[start:stop], factors, sign)

    def add_all(self, y: Tensor, x: Tensor, group: SiteGroup) -> None:
        """Add all sites of the group. y: [T, sum of d_out], the sites' outputs side by side."""
        if not self._lanes:
            return
        rows = y if self.adds_transposed or y.stride(1) == 1 else y.contiguous()
        column = 0
        for site in group.sites:
            self(rows[:, column : column + site.d_out], x, site, None)
            column += site.d_out
        if rows is not y:
            y.copy_(rows)

    def check(self, sites: Sequence[Site], x: Tensor) -> None:
        """Raises ValueError for factors of these sites that do not fit the sites or x."""
        if not self._keys:
            return
        for site in sites:
            for key in self._keys & site.factors.keys():
                check_reads(site, key, site.factors[key], x)


def _add_lane(y: Tensor, x: Tensor, factors: Factors, sign: float) -> None:
    """Add one lane's delta to y [T, d_out], in place."""
    x, a, bt = widened(x, *factors)
    add_product(y, F.linear(x, a), bt, alpha=sign)


class Unpacked:
    """`Loop` for plans with unpacked adapters: checks the factors at every call."""

    adds_transposed = False
    begin = None
    refill = None

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._loop = Loop(lanes)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        self._loop.check((site,), x)
        self._loop(y, x, site, packed)

    def add_all(self, y: Tensor, x: Tensor, group: SiteGroup) -> None:
        self._loop.check(group.sites, x)
        self._loop.add_all(y, x, group)
