"""The offline, profile-based search of V-LoRA (Algorithm 2): time every strategy and tiling on a grid of buckets.

Each group of sites is timed under the conditions of a layer in a model: its factors and the code are not in the cache,
because the base weights have passed through it. Candidates with clearly larger estimated times are not timed.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atmm import reference
from atmm.cpu.lanes import serves
from atmm.dispatch import estimate, rule
from atmm.layers import Factors, Site, SiteGroup
from atmm.operator import add_delta, add_deltas
from atmm.segments import BatchStats, Lane, SegmentPlan
from atmm.strategies.hybrid import divides
from atmm.strategies.registry import served
from atmm.triton.tiling import Tiling, block_r
from atmm.tuning.tables import Bucket, Evenness
from atmm.tuning.timing import DeviceCaches, Replays, factors_of, race, read_by

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
ADAPTERS = (1, 2, 4, 8, 16)
RANKS = (8, 16, 32, 64)
_MOST_ESTIMATED = 4.0  # times the smallest estimate; slower candidates are not timed
_MOST_COMPILED = 512  # tokens; the compiled kernels process one token at a time
_TURNS = 7
_NUM_RANDOM = 8_000_009  # more than the largest factor has; prime, so that consecutive slices of the values differ
_IN_THE_RACE = 1.25  # times the smallest time so far; slower candidates are not timed again
_CLOSE = 1.1  # times the smallest time; candidates within it enter the final race
_FINAL_TURNS = 9
MOST_COPIES, _COPIES_BYTES = 8, 128 * 2**20  # of a group in a graph on a GPU, of which one replay is timed
_LONG_S = 0.015  # seconds of timing per candidate of a bucket, after which a race ends early

log = logging.getLogger(__name__)

_MOST_PROCESSES = 16  # each has a context of its own on the GPU


class Shape(NamedTuple):
    """Sites that read one input: input features, and output features per site."""

    d_in: int
    d_outs: tuple[int, ...]


SHAPES = (
    Shape(896, (896, 128, 128)),
    Shape(896, (896,)),
    Shape(896, (4864, 4864)),
    Shape(4864, (896,)),
    Shape(896, (4864,)),
    Shape(2048, (8192,)),
)
"""The default shapes: the layers of the 0.5 B Qwen2 language model, and two single sites."""


class Case(NamedTuple):
    shape: Shape
    rank: int
    dtype: str
    num_adapters: int
    num_tokens: int
    even: bool

    @classmethod
    def of(cls, bucket: Bucket) -> Case:
        d_out = bucket.d_out // bucket.num_sites
        return cls(
            Shape(bucket.d_in, (d_out,) * bucket.num_sites),
            bucket.rank,
            str(bucket.dtype).removeprefix("torch."),
            bucket.adapters,
            bucket.tokens,
            bucket.evenness != Evenness.RAGGED,
        )

    def plan(self, strategy: str | None = None) -> SegmentPlan:
        """Even segments, or ragged ones: each about half as long as the previous one, as [100, 50, ..., 1]."""
        tokens, adapters = self.num_tokens, self.num_adapters
        if self.even:
            cuts = [tokens * index // adapters for index in range(adapters + 1)]
        else:
            spare, whole = tokens - adapters, 1 - 0.5**adapters
            cuts = [index + round(spare * (1 - 0.5**index) / whole) for index in range(adapters + 1)]
        lanes = [Lane(str(index), *cut) for index, cut in enumerate(itertools.pairwise(cuts))]
        return SegmentPlan(tokens, lanes, strategy)

    def group(self, device: str) -> SiteGroup:
        dtype = getattr(torch, self.dtype)
        group = SiteGroup([Site(str(index), self.shape.d_in, d_out) for index, d_out in enumerate(self.shape.d_outs)])
        keys = [str(key) for key in range(self.num_adapters)]
        values, used = _random_values(dtype, device), 0
        for site, key in itertools.product(group.sites, keys):
            factors = []
            for d in (site.d_in, site.d_out):
                start = used % (len(values) - self.rank * d)
                factors.append(values[start : start + self.rank * d].view(self.rank, d).clone())
                used += self.rank * d + 1
            site.factors[key] = Factors(*factors)
        group.pack(keys)
        return group

    def input(self, device: str) -> tuple[Tensor, list[Tensor]]:
        """Random x [tokens, d_in], and zero outputs of the sites."""
        dtype = getattr(torch, self.dtype)
        size = self.num_tokens * self.shape.d_in
        values = _random_values(dtype, device)
        x = values.repeat(-(-size // len(values)))[:size].view(self.num_tokens, self.shape.d_in)
        return x, [x.new_zeros(self.num_tokens, d_out) for d_out in self.shape.d_outs]


@functools.cache
def _random_values(dtype: torch.dtype, device: str) -> Tensor:
    """Drawn once, because drawing the factors of every case would take a tenth of the search."""
    return (torch.randn(_NUM_RANDOM, device=device) * 0.05).to(dtype)


class Finding(NamedTuple):
    """A bucket with each candidate's seconds for all sites of the group, and the rule's choice."""

    bucket: Bucket
    seconds: Mapping[str, float]
    ruled: str

    @property
    def best(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)


def cases(shapes: Sequence[Shape], dtypes: Sequence[str]) -> list[Case]:
    """The grid in a fixed shuffled order, so that an interrupted search has covered a sample of all sizes."""
    found = []
    for shape, rank, dtype, num_adapters, num_tokens in itertools.product(shapes, RANKS, dtypes, ADAPTERS, TOKENS):
        if num_adapters <= num_tokens:
            found.append(Case(shape, rank, dtype, num_adapters, num_tokens, True))
        if 1 < num_adapters < num_tokens:
            found.append(Case(shape, rank, dtype, num_adapters, num_tokens, False))
    random.Random(0).shuffle(found)
    return found


def search(cases: Sequence[Case], device: str, journal: Path, seconds: float) -> Iterator[Finding | None]:
    """Measure case by case until all are done or the time is up; yields None for a case with a known bucket.

    Args:
        journal: findings so far, one JSON object per line; an interrupted search resumes from it.
    """
    stop = time.monotonic() + seconds
    found = read(journal)
    known = {finding.bucket for finding in found}
    if torch.device(device).type == "cuda":
        from atmm.triton.handles import shared_bytes  # needs Triton

        compile_kernels(kernel_samples(cases, shared_bytes(torch.device(device))), device)
    with journal.open("a") as file, torch.inference_mode():
        file.write("\n")  # the end of a truncated line
        for case in cases:
            if time.monotonic() >= stop:
                return
            group = case.group(device)
            assert group.packed is not None
            bucket = Bucket.of(BatchStats(case.plan(), group.packed.layout))
            if bucket in known:
                yield None
                continue
            known.add(bucket)
            finding = measure(case, group, device)
            file.write(_as_line(finding))
            file.flush()
            yield finding


def measure(case: Case, group: SiteGroup, device: str) -> Finding:
    assert group.packed is not None
    stats = BatchStats(case.plan(), group.packed.layout)
    x, outputs = case.input(device)
    names = candidates(stats)
    calls: Mapping[str, Callable[[], float]]
    if x.is_cuda:
        calls = replayed_calls(case, group, names, device)
    else:
        calls = {name: functools.partial(_cold_seconds, group, case.plan(name), name, x, outputs) for name in names}
    ruled = rule(stats)
    seconds = race(calls, _TURNS, _IN_THE_RACE, _LONG_S)
    best = min(seconds.values())
    # The best of many candidates is partly due to noise. A second race decides whether it really beats the rule.
    finalists = {name: call for name, call in calls.items() if name == ruled or seconds[name] <= _CLOSE * best}
    if len(finalists) > 1:
        seconds |= race(finalists, _FINAL_TURNS, _IN_THE_RACE, _LONG_S, seed=1)
    return Finding(Bucket.of(stats), seconds, ruled)


def kernel_samples(cases: Sequence[Case], most_bytes: int) -> list[KernelSample]:
    """A launch of each kernel that a search of these cases times on a GPU with this much shared memory."""
    from atmm.triton.tiling import finalists, shrink_programs

    found: dict[tuple[object, ...], KernelSample] = {}
    for case in cases:
        shape, itemsize = case.shape, getattr(torch, case.dtype).itemsize
        lengths = [lane.stop - lane.start for lane in case.plan().lanes]
        programs = shrink_programs(lengths, len(shape.d_outs), case.rank)
        for tiling in finalists(itemsize, shape.d_in, max(lengths), case.num_tokens, programs, most_bytes):
            sample = Case(shape, case.rank, case.dtype, 1, 2, True), tiling.name
            found.setdefault(kernel_key(sample), sample)
    return list(found.values())


def replayed_calls(case: Case, group: SiteGroup, names: Sequence[str], device: str) -> dict[str, Replays]:
    """For each strategy a call that runs it on the device and returns the device's seconds for one group.

    A graph adds the deltas of several copies of the group, which are not in the cache, as the engine adds a whole group
    at once. Launches by the host, which take longer than many kernels run, do not count.
    """
    factor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in factors_of(group))
    copies = max(1, min(MOST_COPIES, _COPIES_BYTES // factor_bytes))
    groups = [group, *(case.group(device) for _ in range(copies - 1))]
    x, outputs = case.input(device)
    together = torch.cat(outputs, 1)
    evict = functools.partial(_caches(device, x.dtype).evict, ())
    return {
        name: Replays(functools.partial(_add_to_each, groups, case.plan(name), x, together), evict, copies)
        for name in names
    }


def _add_to_each(groups: Sequence[SiteGroup], plan: SegmentPlan, x: Tensor, y: Tensor) -> None:
    for group in groups:
        add_deltas(y, x, group, plan)


_caches = functools.cache(DeviceCaches)


def candidates(stats: BatchStats) -> list[str]:
    """Strategies worth timing that requests can be served with, including the rule's choice."""
    layout = stats.layout
    if layout.device.type == "cuda":
        from atmm.triton.handles import shared_bytes  # needs Triton
        from atmm.triton.tiling import finalists, shrink_programs

        lengths = [lane.stop - lane.start for lane in stats.lanes]
        highest = max(span.rank for site in layout.spans for span in site.values())
        programs = shrink_programs(lengths, len(stats.live), highest)
        sizes = layout.dtype.itemsize, layout.d_in, max(lengths), stats.num_tokens, programs
        tilings = finalists(*sizes, shared_bytes(layout.device))
        return ["tiled", *(tiling.name for tiling in tilings)]
    estimates = estimate(stats)
    least = min(estimates.values())
    names = [name for name, seconds in estimates.items() if seconds <= _MOST_ESTIMATED * least]
    if serves(layout.device, layout.dtype):
        if stats.num_tokens <= _MOST_COMPILED:
            names.append("compiled")
        if divides(stats.lanes):
            names.append("divided")
    ruled = rule(stats)
    return names if ruled in names else [*names, ruled]


def _cold_seconds(group: SiteGroup, plan: SegmentPlan, strategy: str, x: Tensor, outputs: list[Tensor]) -> float:
    """CPU seconds of a strategy with its factors in memory; other processes may share the CPU."""
    _caches("cpu", x.dtype).evict(read_by(strategy, group))
    start = time.process_time()
    for site, y in zip(group.sites, outputs, strict=True):
        add_delta(y, x, site, plan)
    return time.process_time() - start


def error(case: Case, strategy: str, device: str) -> float:
    """Largest error of a strategy on a case relative to the largest delta, against the float64 reference."""
    group = case.group(device)
    x, outputs = case.input(device)
    worst = 0.0
    for site, y in zip(group.sites, outputs, strict=True):
        right = reference.add_delta(y, x, site, case.plan())
        add_delta(y, x, site, case.plan(strategy))
        worst = max(worst, ((y.double() - right).abs().max() / right.abs().max()).item())
    return worst


def read(journal: Path) -> list[Finding]:
    """The findings of an interrupted search; empty without a journal. Truncated lines and those of other versions are
    skipped, so that their cases are measured again.
    """
    if not journal.exists():
        return []
    found = []
    for line in journal.read_bytes().splitlines():
        try:
            found.append(_from_line(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found


def _as_line(finding: Finding) -> str:
    bucket = [*finding.bucket.row, finding.bucket.device_type]
    return json.dumps({"bucket": bucket, "seconds": dict(finding.seconds), "ruled": finding.ruled}) + "\n"


def _from_line(line: Mapping[str, Any]) -> Finding:
    *row, device_type = line["bucket"]
    seconds = {name: float(taken) for name, taken in line["seconds"].items()}
    if line["ruled"] not in seconds or not all(served(name, device_type) for name in seconds):
        raise ValueError(f"measured other strategies: {', '.join(seconds)}")
    return Finding(Bucket.of_row(row, device_type), seconds, line["ruled"])


# Compile the kernels of a search in parallel processes: one takes a second, and a search times hundreds.
#
# Triton keeps compiled kernels in a folder that processes share, so the search then loads them.


KernelSample = tuple[Case, str]
"""A case of one lane of two tokens, and a tiling: a launch that compiles the tiling's kernels for the case's shape."""


def kernel_key(sample: KernelSample) -> tuple[object, ...]:
    """The values on which the kernels' compile-time sizes depend: equal for samples with the same kernels."""
    (shape, rank, dtype, *_), tiling = sample[0], Tiling.named(sample[1])
    even_k = shape.d_in % (tiling.block_k * max(1, tiling.split_k)) == 0
    even_n = math.gcd(*shape.d_outs) % tiling.block_n == 0
    num_sites = len(shape.d_outs) if tiling.split_k else 0  # a shrink is compiled for them
    return tiling, block_r(rank), rank // 65, even_k, even_n, num_sites, dtype


def compile_kernels(samples: Sequence[KernelSample], device: str) -> None:
    """Launch every sample once, in as many processes as cores, each on the device.

    A process that fails is logged only: the search then compiles what is missing.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number = min(_MOST_PROCESSES, cores, len(samples))
    if not number:
        return
    shares = [samples[start::number] for start in range(number)]
    # Spawned, because a process that has used a GPU cannot be forked.
    with ProcessPoolExecutor(number, multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(launch, share, device) for share in shares]:
            try:
                future.result()
            except Exception as error:  # of the process, of Triton or of the device
                log.warning("kernels are compiled during the search: %s: %s", type(error).__name__, error)


def launch(samples: Sequence[KernelSample], device: str) -> int:
    with torch.inference_mode():
        for case, tiling in samples:
            x, outputs = case.input(device)
            add_deltas(torch.cat(outputs, 1), x, case.group(device), case.plan(tiling))
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return len(samples)
