"""Where deltas are added: the linear layers adapters may target, alone and in groups that read the same input."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Factors(NamedTuple):
    """One adapter's low-rank factors at one site: a [r, d_in], bt [r, d_out]; its scaling is folded into bt.

    Rank is the leading dimension of both, so that every row is contiguous and adapters of any rank lie side by side.
    """

    a: torch.Tensor
    bt: torch.Tensor


class Site:
    """One linear layer d_in -> d_out. `factors` by adapter key; an absent key means the adapter does not target it."""

    def __init__(self, name: str, d_in: int, d_out: int) -> None:
        self.name = name
        self.d_in = d_in
        self.d_out = d_out
        self.factors: dict[str, Factors] = {}
        self.group = SiteGroup((self,))
        self.place = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """Factors of several adapters side by side, for one group.

    a [R, d_in]: site after site, within a site key after key. bts[i] [R_i, d_out_i] and columns[i] = (c0, c1): site i's part.
    layout: number of the column layout (which key owns which column); equal layouts share masks.
    """

    keys: tuple[str, ...]
    a: torch.Tensor
    bts: tuple[torch.Tensor, ...]
    columns: tuple[tuple[int, int], ...]
    owners: tuple[tuple[str, int], ...]
    layout: int
    equal_rank: bool


class SiteGroup:
    """Sites fed by the very same input tensor (q, k, v of a layer; gate, up), so that one shrink can serve them all."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = tuple(sites)
        self.packed: Packed | None = None
        for place, site in enumerate(self.sites):
            site.group, site.place = self, place

    def packed_bytes(self, keys: Sequence[str]) -> int:
        """Bytes a packed copy for these adapters takes; 0 when none of them targets the group."""
        return sum(_aligned(p.a) + _aligned(p.bt) for site in self.sites for p in _chosen(site, keys))

    def pack(self, keys: Sequence[str], buffer: torch.Tensor | None = None) -> None:
        """Copy the factors of `keys` side by side into `buffer` (uint8, `packed_bytes` long), or into memory of its own.

        Done when the set of adapters in use changes, never per step.
        """
        pairs = [list(_chosen(site, keys)) for site in self.sites]
        flat = [pair for per_site in pairs for pair in per_site]
        if not flat:
            self.packed = None
            return
        dtype, device = flat[0].a.dtype, flat[0].a.device
        if buffer is None:
            buffer = torch.empty(self.packed_bytes(keys), dtype=torch.uint8, device=device)
        cursor = 0

        def take(rows: int, width: int) -> torch.Tensor:
            nonlocal cursor
            num_bytes = rows * width * dtype.itemsize
            view = buffer[cursor : cursor + num_bytes].view(dtype).view(rows, width)
            cursor += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return view

        ranks = [[pair.a.shape[0] for pair in per_site] for per_site in pairs]
        a = take(sum(map(sum, ranks)), self.sites[0].d_in)
        torch.cat([pair.a for pair in flat], out=a)
        bts = []
        for site, per_site, site_ranks in zip(self.sites, pairs, ranks, strict=True):
            bt = take(sum(site_ranks), site.d_out)
            if per_site:
                torch.cat([pair.bt for pair in per_site], out=bt)
            bts.append(bt)
        ends = list(itertools.accumulate(map(sum, ranks)))
        columns = tuple((end - sum(site_ranks), end) for end, site_ranks in zip(ends, ranks, strict=True))
        owners = tuple(
            (key, site.factors[key].a.shape[0]) for site in self.sites for key in keys if key in site.factors
        )
        self.packed = Packed(
            keys=tuple(keys),
            a=a,
            bts=tuple(bts),
            columns=columns,
            owners=owners,
            layout=_layout_number(owners),
            equal_rank=len({rank for _, rank in owners}) == 1 and all(len(r) == len(keys) for r in ranks),
        )

    def unpack(self) -> None:
        """Forget the packed copy; its buffer may be used for something else."""
        self.packed = None


_ALIGNMENT = 256
_layouts: dict[tuple[tuple[str, int], ...], int] = {}


def _layout_number(owners: tuple[tuple[str, int], ...]) -> int:
    return _layouts.setdefault(owners, len(_layouts))


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _chosen(site: Site, keys: Sequence[str]) -> list[Factors]:
    return [site.factors[key] for key in keys if key in site.factors]
