"""Selection of a strategy per shape: the plan's forced strategy, else the measured table, else a rule.

A strategy is selected once per plan and class of sites, never per layer.

The rule estimates the time of a strategy as call overhead plus memory traffic plus arithmetic. The constants are
orders of magnitude; they suffice to rank the strategies where there are no measurements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from atmm.cpu.lanes import serves
from atmm.processor import prefers_float32
from atmm.segments import BatchStats
from atmm.strategies.hybrid import divides
from atmm.strategies.registry import reads_in_place
from atmm.tuning.tables import Bucket, table_for

_THIN = 32  # tokens


def is_thin(num_tokens: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled kernels compute a batch of this size regardless of its lanes.

    This applies to packed copies and to separate shrink and expand calls. For unpacked adapters the length of each lane
    decides, see `atmm.strategies.hybrid`.
    """
    return num_tokens <= _THIN and serves(device, dtype)


def choose(stats: BatchStats) -> str:
    """The name of a strategy for a plan with all adapters packed."""
    return measured(stats) or rule(stats)


def measured(stats: BatchStats) -> str | None:
    """The strategy that the device's table names for a shape; None if the table does not have the shape."""
    if stats.keys != stats.layout.targeting:  # tables are measured without unused packed adapters
        return None
    return table_for(stats.layout.device.type).get(Bucket.of(stats))


def rule(stats: BatchStats) -> str:
    """The strategy for a shape without measurements.

    A GPU uses the Triton kernels with their usual tiling: they need two launches for all lanes, the others two or more
    per adapter. On a CPU, thin batches use the compiled kernels, and batches with short and long lanes use them for the
    short lanes. Where products of the factors' type are slow, so do all wider batches, and multiply long lanes in
    float32. All others use the strategy with the smallest estimate.
    """
    layout = stats.layout
    if layout.device.type == "cuda" and reads_in_place(layout.device, layout.dtype):
        return "tiled"
    if is_thin(stats.num_tokens, layout.device, layout.dtype):
        return "compiled"
    if prefers_float32(layout.dtype, layout.device):
        return "divided"  # strategies on packed copies multiply in the factors' type
    if divides(stats.lanes) and serves(layout.device, layout.dtype):
        return "divided"
    seconds = estimate(stats)
    return min(seconds, key=seconds.__getitem__)


class _Machine(NamedTuple):
    call_s: float
    bytes_per_s: float
    flops_per_s: float


# One thread of an x86 server core: a 16-bit product goes through oneDNN, which costs 20 us regardless of the size.
_CPU_16_BIT = _Machine(20e-6, 12e9, 600e9)
_CPU_WIDE = _Machine(3e-6, 12e9, 150e9)


def estimate(stats: BatchStats) -> dict[str, float]:
    """Rough estimate of the seconds per strategy for all sites of the group."""
    layout = stats.layout
    machine = _CPU_16_BIT if layout.dtype.itemsize == 2 else _CPU_WIDE
    num_lanes = num_runs = used = work = own = 0
    for d_out, runs in zip(layout.d_outs, stats.runs, strict=True):
        num_runs += len(runs)
        for run in runs:
            num_lanes += run.num_lanes
            rows = run.num_lanes * run.rank
            used += rows * (layout.d_in + d_out)
            work += rows * (layout.d_in + d_out) * run.length
            own += rows * d_out * run.length
    shrink = layout.num_rows * layout.d_in
    expand = sum(width * d_out for width, d_out in zip(layout.widths, layout.d_outs, strict=True))
    # Every strategy reads and writes the outputs. They do not change the ranking, but where they dominate, the
    # estimates are close and the search times more candidates.
    outputs = 2 * stats.num_tokens * sum(layout.d_outs)

    def seconds(calls: float, elements: int, products: int) -> float:
        read = (elements + outputs) * layout.dtype.itemsize / machine.bytes_per_s
        return calls * machine.call_s + read + 2 * products / machine.flops_per_s

    return {
        "loop": seconds(2 * num_lanes, used, work),
        "batched": seconds(2 * num_runs, used, work),
        "stacked": seconds(
            1 + sum(1 for width in layout.widths if width), shrink + expand, (shrink + expand) * stats.num_tokens
        ),
        "gathered": seconds(1 + len(stats.live), shrink + expand, shrink * stats.num_tokens) + own / 10e9,
    }
