"""Compile the kernels of a search in parallel processes: one takes a second, and a search times hundreds.

Triton keeps compiled kernels in a folder that processes share, so the search then loads them.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch

from atmm.layers import Factors, Site, SiteGroup
from atmm.operator import add_deltas
from atmm.segments import Lane, SegmentPlan
from atmm.triton.tiling import Tiling, block_r

log = logging.getLogger(__name__)

_KEY = "own"
_MOST_PROCESSES = 16  # each has a context of its own on the GPU
KernelKey = tuple[object, ...]


class KernelSample(NamedTuple):
    """A launch that compiles the kernels of one tiling for a shape. d_outs: of the sites."""

    d_in: int
    d_outs: tuple[int, ...]
    rank: int
    dtype: str
    tiling: str

    def key(self) -> KernelKey:
        """The values on which the kernels' compile-time sizes depend: equal for samples with the same kernels."""
        tiling = Tiling.named(self.tiling)
        even_k = self.d_in % (tiling.block_k * max(1, tiling.split_k)) == 0
        even_n = math.gcd(*self.d_outs) % tiling.block_n == 0
        num_sites = len(self.d_outs) if tiling.split_k else 0  # a shrink is compiled for them
        return tiling, block_r(self.rank), self.rank // 65, even_k, even_n, num_sites, self.dtype


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
    """Launch the samples in this process; returns their number."""
    with torch.inference_mode():
        for sample in samples:
            x = torch.zeros(2, sample.d_in, dtype=getattr(torch, sample.dtype), device=device)
            y = x.new_zeros(2, sum(sample.d_outs))
            group = SiteGroup([Site(str(index), sample.d_in, d_out) for index, d_out in enumerate(sample.d_outs)])
            for site in group.sites:
                site.factors[_KEY] = Factors(x.new_zeros(sample.rank, site.d_in), x.new_zeros(sample.rank, site.d_out))
            group.pack((_KEY,))
            add_deltas(y, x, group, SegmentPlan(2, (Lane(_KEY, 0, 2),), sample.tiling))
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return len(samples)
