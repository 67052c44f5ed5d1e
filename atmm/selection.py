"""Which strategy for which shape: the plan's wish, else the measured table, else a rule.

A choice is made once per plan and class of sites, never per layer.

The rule estimates each strategy's time as its calls, plus the bytes of factors it reads, plus its arithmetic. The constants
are orders of magnitude, good enough to rank the three where nobody has measured.
"""

from __future__ import annotations

from typing import NamedTuple

from atmm.bucket import Bucket
from atmm.survey import Survey
from atmm.tables import table_for


def choose(survey: Survey, wish: str | None = None) -> str:
    """A name of `STRATEGIES` for a survey whose adapters are all packed. `wish` is taken as it is."""
    if wish is not None:
        return wish
    if _used_rows(survey) == survey.layout.num_rows:  # tables are measured with nothing packed that is not used
        known = table_for(survey.layout.device.type).get(Bucket.of(survey).key())
        if known is not None:
            return known
    estimates = estimate(survey)
    return min(estimates, key=estimates.__getitem__)


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
    if layout.device.type == "cuda":
        machine = _CUDA
    else:
        machine = _CPU_16_BIT if layout.dtype.itemsize == 2 else _CPU_WIDE
    num_lanes = num_runs = used = work = stacked_elements = 0
    for width, d_out, runs in zip(layout.widths, layout.d_outs, survey.runs, strict=True):
        stacked_elements += width * (layout.d_in + d_out)
        num_runs += len(runs)
        for run in runs:
            num_lanes += run.num_lanes
            elements = run.num_lanes * run.rank * (layout.d_in + d_out)
            used += elements
            work += elements * run.length

    def seconds(calls: int, elements: int, products: int) -> float:
        read = elements * layout.dtype.itemsize / machine.bytes_per_s
        return calls * machine.call_s + read + 2 * products / machine.flops_per_s

    stacked_calls = 1 + sum(1 for width in layout.widths if width)
    return {
        "loop": seconds(2 * num_lanes, used, work),
        "batched": seconds(2 * num_runs, used, work),
        "stacked": seconds(stacked_calls, stacked_elements, stacked_elements * survey.num_tokens),
    }


def _used_rows(survey: Survey) -> int:
    keys = {lane.key for lane in survey.lanes}
    return sum(span.rank for site in survey.layout.spans for span in site if span.key in keys)
