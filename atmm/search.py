"""Measure every strategy on a grid of buckets and write the table for this machine: `python -m atmm.search --out FILE`.

The offline, profile-based search of V-LoRA (Algorithm 2), over strategies. Each group of sites is timed as a layer of
a model meets it: its factors and the code have left the cache, because the base weights have passed through in
between.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import pathlib
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from atmm.bucket import Bucket
from atmm.operator import add_delta
from atmm.segments import Lane, SegmentPlan
from atmm.selection import rule
from atmm.sites import Factors, Site, SiteGroup
from atmm.strategies import STRATEGIES, comes_transposed
from atmm.survey import Survey
from atmm.tables import write

# (d_in, d_out of each site): the groups of a layer of the 0.5 B Qwen2 language model.
GROUPS = ((896, (896, 128, 128)), (896, (896,)), (896, (4864, 4864)), (4864, (896,)))
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ADAPTERS = (1, 2, 4, 8, 16)
RANKS = (8, 16, 32, 64)
TOLERANCE = 1.1  # the rule's choice may be this much slower than the best before a row is written
CACHE_ELEMENTS = 6 * 2**20  # float32 elements that are read to drive everything else out of the core's own caches


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m atmm.search", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the table's file")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        for dtype, (d_in, d_outs), rank, num_adapters in itertools.product(options.dtype, GROUPS, RANKS, ADAPTERS):
            group = _group(d_in, d_outs, num_adapters, rank, getattr(torch, dtype), options.device)
            for plan in _plans(num_adapters):
                bucket, seconds, chosen = measure(group, plan, options.repeats)
                best = min(seconds, key=seconds.__getitem__)
                if seconds[chosen] > TOLERANCE * seconds[best]:
                    rows.append((bucket, best))
                times = " ".join(f"{name} {value * 1e6:.0f}" for name, value in seconds.items())
                print(f"{bucket} us: {times} best {best} rule {chosen}", flush=True)
    write(options.out, options.device, datetime.date.today().isoformat(), rows)


def measure(group: SiteGroup, plan: SegmentPlan, repeats: int) -> tuple[Bucket, dict[str, float], str]:
    """The plan's bucket, each strategy's least seconds for all sites of the group, and what the rule says."""
    packed = group.packed
    assert packed is not None
    survey = Survey(plan, packed.layout)
    x = torch.randn(plan.num_tokens, group.sites[0].d_in).to(packed.a)
    transposed = comes_transposed(x)
    outputs = [
        torch.zeros(site.d_out, plan.num_tokens).to(x).t()
        if transposed
        else torch.zeros(plan.num_tokens, site.d_out).to(x)
        for site in group.sites
    ]
    others = torch.ones(CACHE_ELEMENTS, device=x.device)
    plans = {name: SegmentPlan(plan.num_tokens, plan.lanes, name) for name in STRATEGIES}
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _, (name, forced) in itertools.product(range(repeats + 1), plans.items()):
        others.sum()
        times[name].append(_time(group, forced, x, outputs))
    return Bucket.of(survey), {name: min(taken[1:]) for name, taken in times.items()}, rule(survey, transposed)


def _time(group: SiteGroup, plan: SegmentPlan, x: Tensor, outputs: list[Tensor]) -> float:
    clock = time.perf_counter if x.is_cuda else time.process_time  # a CPU may be shared with others
    if x.is_cuda:
        torch.cuda.synchronize()
    start = clock()
    for site, y in zip(group.sites, outputs, strict=True):
        add_delta(y, x, site, plan)
    if x.is_cuda:
        torch.cuda.synchronize()
    return clock() - start


def _group(
    d_in: int, d_outs: tuple[int, ...], num_adapters: int, rank: int, dtype: torch.dtype, device: str
) -> SiteGroup:
    group = SiteGroup([Site(str(index), d_in, d_out) for index, d_out in enumerate(d_outs)])
    keys = [str(key) for key in range(num_adapters)]
    for site in group.sites:
        for key in keys:
            a, bt = torch.randn(rank, d_in) * 0.05, torch.randn(rank, site.d_out) * 0.05
            site.factors[key] = Factors(a.to(device, dtype), bt.to(device, dtype))
    group.pack(keys)
    return group


def _plans(num_adapters: int) -> Iterator[SegmentPlan]:
    """Even segments, then ragged ones: each about a quarter as long as the one before."""
    for num_tokens in TOKENS:
        if num_tokens < num_adapters:
            continue
        cuts = [num_tokens * index // num_adapters for index in range(num_adapters + 1)]
        yield SegmentPlan(num_tokens, _lanes(cuts))
        if 1 < num_adapters < num_tokens:
            spare = num_tokens - num_adapters
            cuts = [0] + [spare - (spare >> 2 * index) + index for index in range(1, num_adapters)] + [num_tokens]
            yield SegmentPlan(num_tokens, _lanes(cuts))


def _lanes(cuts: list[int]) -> list[Lane]:
    return [Lane(str(index), start, stop) for index, (start, stop) in enumerate(itertools.pairwise(cuts))]


if __name__ == "__main__":
    main()
