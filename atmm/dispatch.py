"""Which strategy for which shape: the plan's wish, else the measured table, else a rule.

A choice is made once per plan and class of sites, never per layer.

The rule estimates each strategy's time as its calls, plus the bytes that pass, plus its arithmetic. The
constants are orders of magnitude, good enough to rank them where nobody has measured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from atmm.batch_stats import Survey
from atmm.cpu.lanes import serves
from atmm.strategies.hybrid import divides
from atmm.strategies.registry import served
from atmm.tuning.buckets import Bucket
from atmm.tuning.tables import table_for

_THIN = 32  # tokens
# Where outputs lie transposed: packed rows of a site up to which one product over all of them beats products per
# adapter, and values of an output up to which rows are gathered faster than multiplied (docs/decisions.md, 2026-11-21).
_WIDEST_TRANSPOSED = 1024
_FEW_VALUES = 40_000


def is_thin(num_tokens: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a batch of so many tokens is computed by the compiled kernels whatever its lanes: from packed copies, and
    in halves. From adapters where they lie each lane goes by its own length, see `atmm.strategies.hybrid`."""
    return num_tokens <= _THIN and serves(device, dtype)


def choose(survey: Survey, transposed: bool = False) -> str:
    """The name of a strategy for a survey whose adapters are all packed. transposed: how the output lies."""
    if survey.keys == survey.layout.targeting:  # tables are measured with nothing packed that is not used
        known = table_for(survey.layout.device.type).get(Bucket.of(survey).key())
        if known is not None:
            return served(known, survey)
    return rule(survey, transposed)


def rule(survey: Survey, transposed: bool = False) -> str:
    """What is chosen where nobody has measured: the compiled kernels for thin batches, and for the short of lanes that
    are not all alike, else the least estimate."""
    layout = survey.layout
    if is_thin(survey.num_tokens, layout.device, layout.dtype):
        return "compiled"
    if divides(survey.lanes) and serves(layout.device, layout.dtype):
        return "divided"
    if transposed and max(layout.widths) <= _WIDEST_TRANSPOSED:
        return "gathered" if survey.num_tokens * max(layout.d_outs) <= _FEW_VALUES else "stacked"
    seconds = estimate(survey)
    return min(seconds, key=seconds.__getitem__)


class _Machine(NamedTuple):
    call_s: float
    bytes_per_s: float
    flops_per_s: float


# One thread of an x86 server core: a 16-bit product goes through oneDNN, which costs 20 us whatever the size.
_CPU_16_BIT = _Machine(20e-6, 12e9, 600e9)
_CPU_WIDE = _Machine(3e-6, 12e9, 150e9)
_CUDA = _Machine(8e-6, 1.5e12, 100e12)


def estimate(survey: Survey) -> dict[str, float]:
    """Seconds per strategy for all sites of the group, roughly."""
    layout = survey.layout
    on_cpu = _CPU_16_BIT if layout.dtype.itemsize == 2 else _CPU_WIDE
    machine = _CUDA if layout.device.type == "cuda" else on_cpu
    num_lanes = num_runs = used = work = own = 0
    for d_out, runs in zip(layout.d_outs, survey.runs, strict=True):
        num_runs += len(runs)
        for run in runs:
            num_lanes += run.num_lanes
            rows = run.num_lanes * run.rank
            used += rows * (layout.d_in + d_out)
            work += rows * (layout.d_in + d_out) * run.length
            own += rows * d_out * run.length
    shrink = layout.num_rows * layout.d_in
    expand = sum(width * d_out for width, d_out in zip(layout.widths, layout.d_outs, strict=True))
    # Everybody reads and writes these: no reason for one or the other, but for timing both where they are most of it.
    outputs = 2 * survey.num_tokens * sum(layout.d_outs)

    def seconds(calls: float, elements: int, products: int) -> float:
        read = (elements + outputs) * layout.dtype.itemsize / machine.bytes_per_s
        return calls * machine.call_s + read + 2 * products / machine.flops_per_s

    estimates = {
        "loop": seconds(2 * num_lanes, used, work),
        "batched": seconds(2 * num_runs, used, work),
        "stacked": seconds(
            1 + sum(1 for width in layout.widths if width), shrink + expand, (shrink + expand) * survey.num_tokens
        ),
    }
    if layout.device.type == "cpu":
        estimates["gathered"] = seconds(1 + len(survey.live), shrink + expand, shrink * survey.num_tokens) + own / 10e9
    return estimates
