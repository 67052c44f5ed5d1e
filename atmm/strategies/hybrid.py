"""The strategies that read unpacked adapters in place: lane by lane, and for decode, prefill and mixed steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from atmm.cpu.lanes import Scattered, serves
from atmm.cpu.products import has_tiles
from atmm.layers import Packed, Site, SiteGroup, check_reads
from atmm.matmul import add_product, widened
from atmm.processor import prefers_float32
from atmm.segments import Lane, Strategy


class Loop(Strategy):
    """Two products per lane. checks: whether each call checks the factors; else packing or `check` has done so."""

    def __init__(self, lanes: Sequence[Lane], *, checks: bool = False) -> None:
        self._lanes = tuple(lanes)
        self._checks = checks
        self._keys = frozenset(lane.key for lane in lanes)

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        if self._checks:
            self.check((site,), x)
        self._add(y, x, site)

    def _add(self, y: Tensor, x: Tensor, site: Site) -> None:
        factors_of = site.factors
        for key, start, stop, sign in self._lanes:
            factors = factors_of.get(key)
            if factors is not None:
                own, a, bt = widened(x[start:stop], *factors)
                add_product(y[start:stop], F.linear(own, a), bt, alpha=sign)

    def add_all(self, y: Tensor, x: Tensor, group: SiteGroup) -> None:
        if not self._lanes:
            return
        if self._checks:
            self.check(group.sites, x)
        column = 0
        for site in group.sites:
            self._add(y[:, column : column + site.d_out], x, site)
            column += site.d_out

    def check(self, sites: Sequence[Site], x: Tensor) -> None:
        """Raises ValueError for factors of these sites that do not fit the sites or x."""
        if not self._keys:
            return
        for site in sites:
            for key in self._keys & site.factors.keys():
                check_reads(site, key, site.factors[key], x)


# Lane length in tokens up to which the compiled kernels, which read the adapter's rows again for each token, cost less
# than the calls of two products (docs/decisions/0006).
SHORT = 8


class Hybrid(Strategy):
    """Short lanes by one call of the compiled kernels, long lanes by two products each.

    The kernels pass over every token between the first and the last short lane, so sort batches by lane length.
    Requires `atmm.cpu.lanes.serves`.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._short = Scattered([lane for lane in lanes if not _is_long(lane)])
        self._long = Loop(tuple(filter(_is_long, lanes)))

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        self._long.check((site,), x)
        self._short(y, x, site, packed)
        self._long(y, x, site, packed)

    def add_all(self, y: Tensor, x: Tensor, group: SiteGroup) -> None:
        self._long.check(group.sites, x)
        self._short.add_all(y, x, group)
        self._long.add_all(y, x, group)


def divided(lanes: Sequence[Lane], dtype: torch.dtype) -> Strategy:
    """Short and long lanes, each by what is fastest for them. Kernels with matrix tiles compute both kinds."""
    return Scattered(lanes) if has_tiles(dtype) else Hybrid(lanes)


def longest_short_lane(device: torch.device, dtype: torch.dtype) -> int:
    """The maximum length in tokens of a short lane; 0 where all lanes are computed the same way."""
    return SHORT if serves(device, dtype) else 0


def gains_from_copies(lanes: Sequence[Lane], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed copies could speed up these lanes: several long lanes can then share products.

    Never where kernels read long lanes in place (a GPU, matrix tiles), nor where the shared products are slow.
    """
    if device.type == "cuda" or prefers_float32(dtype, device):
        return False
    return not serves(device, dtype) or (sum(map(_is_long, lanes)) > 1 and not has_tiles(dtype))


def divides(lanes: Sequence[Lane]) -> bool:
    """Whether some lanes are short and others long; otherwise one method computes all lanes."""
    return 0 < sum(map(_is_long, lanes)) < len(lanes)


def _is_long(lane: Lane) -> bool:
    return lane.stop - lane.start > SHORT
