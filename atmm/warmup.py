"""Compile GPU kernels before the first request: compiling a kernel takes a second, a step takes milliseconds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from atmm.layers import Factors, Site, SiteGroup
from atmm.operator import add_deltas, merge_quantized
from atmm.quantized import Allocate, QuantizedWeight, StoredWeight
from atmm.segments import Lane, SegmentPlan
from atmm.strategies.registry import triton_interprets
from atmm.triton.tiling import Tiling, all_usual, block_r
from atmm.tuning import tables
from atmm.tuning.tables import round_up

HIGHEST_RANK = 64
_MOST_TOKENS = 4096  # of a step, whose number of tokens decides how many programs share a sum
_KEYS = ("own", "merged")


def compile_ahead(groups: Sequence[SiteGroup], dtype: torch.dtype, device: torch.device) -> None:
    """Launch every kernel once that the rule or the device's table selects for these sites.

    This compiles the kernels, or loads them if an earlier run compiled them. Kernels for ranks above 64, or for more
    than two lanes per token, are compiled at their first request.
    """
    if triton_interprets():
        return  # the interpreter compiles nothing
    shapes = {(group.sites[0].d_in, tuple(site.d_out for site in group.sites)) for group in groups}
    ranks = {block_r(rank) for rank in range(1, HIGHEST_RANK + 1)}
    with torch.inference_mode():
        for (d_in, d_outs), rank in itertools.product(sorted(shapes), sorted(ranks)):
            group = _plain_group(d_in, d_outs, rank, dtype, device)
            x = torch.zeros(2, d_in, dtype=dtype, device=device)
            y = x.new_zeros(2, sum(d_outs))
            for tiling in set(tilings_to_compile(d_in, len(d_outs), dtype, device)):
                own, merged = Lane(_KEYS[0], 0, 2), Lane(_KEYS[1], 0, 2, -1.0)
                for lanes in ((own,), (own, merged)):
                    add_deltas(y, x, group, SegmentPlan(2, lanes, tiling.name))


def compile_merges(shapes: Iterable[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> None:
    """Launch the kernel of `merge` once for weights of these shapes (out, in) and every rank up to 64.

    Ranks with the same kernel share it, so few are compiled. Kernels for higher ranks are compiled at their first
    merge.
    """
    if triton_interprets():
        return
    from atmm.triton.merging import merge  # importing Triton is slow

    with torch.inference_mode():
        for d_out, d_in in sorted(shapes):
            weight = torch.zeros(1, d_out, d_in, dtype=dtype, device=device)
            a, bt = (torch.zeros(HIGHEST_RANK, d, dtype=dtype, device=device) for d in (d_in, d_out))
            for rank in range(1, HIGHEST_RANK + 1):
                merge(weight, weight, a[None, :rank], bt[None, :rank], 1.0)


def compile_quantized_merges(
    shapes: Iterable[tuple[int, int]], allocate: Allocate, dtype: torch.dtype, device: torch.device
) -> None:
    """As `compile_merges`, for merges of factors of a dtype into quantized weights, which `allocate` makes."""
    if triton_interprets():
        return
    everything = slice(None)
    with torch.inference_mode():
        for d_out, d_in in sorted(shapes):
            weight = allocate([1, d_out, d_in], dtype, device)
            assert isinstance(weight, QuantizedWeight)
            a, bt = (torch.zeros(1, HIGHEST_RANK, d, dtype=dtype, device=device) for d in (d_in, d_out))
            for rank in range(1, HIGHEST_RANK + 1):
                merge_quantized(weight, weight, [(everything, everything, a[:, :rank], bt[:, :rank])])


def compile_products(weights: Iterable[StoredWeight], dtype: torch.dtype, device: torch.device) -> None:
    """Launch the kernels of products with quantized weights [d_out, d_in] once for every number of tokens."""
    if triton_interprets():
        return
    shapes = {(each.shape, each.format): each for each in weights if isinstance(each, QuantizedWeight)}
    with torch.inference_mode():
        for weight, power in itertools.product(shapes.values(), range(_MOST_TOKENS.bit_length())):
            weight.product(torch.zeros(2**power, weight.shape[1], dtype=dtype, device=device), None)


def _plain_group(d_in: int, d_outs: Sequence[int], rank: int, dtype: torch.dtype, device: torch.device) -> SiteGroup:
    group = SiteGroup([Site(str(index), d_in, d_out) for index, d_out in enumerate(d_outs)])
    for site, key in itertools.product(group.sites, _KEYS):
        a, bt = (torch.zeros(rank, d, dtype=dtype, device=device) for d in (d_in, site.d_out))
        site.factors[key] = Factors(a, bt)
    group.pack(_KEYS)
    return group


def tilings_to_compile(d_in: int, num_sites: int, dtype: torch.dtype, device: torch.device) -> Iterator[Tiling]:
    """Tilings that the rule may select, and those that the device's table names for sites of this kind."""
    yield from all_usual(dtype.itemsize)
    table = tables.choose_table(device.type, torch.get_num_threads()).table
    for bucket, strategy in () if table is None else table.rows:
        is_this = (bucket.d_in, bucket.num_sites, bucket.dtype) == (round_up(d_in), num_sites, dtype)
        if is_this and strategy.startswith("tiled "):
            yield Tiling.named(strategy)
