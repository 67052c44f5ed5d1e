"""What one plan asks of one class of sites: the facts that strategies prepare from and the choice between them is made on."""

from __future__ import annotations

from typing import NamedTuple

from atmm.segments import Lane, SegmentPlan
from atmm.sites import Layout, Span


class Run(NamedTuple):
    """Lanes that one batched matmul serves without padding or copies: adjacent tokens, adjacent packed rows, one rank, one
    length, one sign. `num_lanes` lanes of `length` tokens from token `start`; factors of `rank` rows from packed row `row`.
    """

    start: int
    num_lanes: int
    length: int
    row: int
    rank: int
    sign: float

    @property
    def num_tokens(self) -> int:
        return self.num_lanes * self.length


class Survey:
    """One plan against one layout.

    lanes: those whose adapter targets a site of the group. start, stop: the smallest token range that holds them all.
    runs: per site. covered: the packed copy holds every adapter of the plan.
    """

    __slots__ = ("covered", "lanes", "layout", "runs", "start", "stop")

    def __init__(self, plan: SegmentPlan, layout: Layout) -> None:
        targeting = {span.key for site in layout.spans for span in site if span.rank}
        self.layout = layout
        self.covered = plan.keys <= layout.keys
        self.lanes = tuple(lane for lane in plan.lanes if lane.key in targeting)
        self.start = min((lane.start for lane in self.lanes), default=0)
        self.stop = max((lane.stop for lane in self.lanes), default=0)
        order = sorted(self.lanes, key=lambda lane: (lane.start, lane.stop))
        self.runs = tuple(_runs(order, spans) for spans in layout.spans)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_adapters(self) -> int:
        return len({lane.key for lane in self.lanes})


def _runs(lanes: list[Lane], spans: tuple[Span, ...]) -> tuple[Run, ...]:
    by_key = {span.key: span for span in spans if span.rank}
    runs: list[Run] = []
    for key, start, stop, sign in lanes:
        span = by_key.get(key)
        if span is None:
            continue
        run = Run(start, 1, stop - start, span.start, span.rank, sign)
        last = runs[-1] if runs else None
        if (
            last is not None
            and (last.length, last.rank, last.sign) == (run.length, run.rank, run.sign)
            and last.start + last.num_tokens == run.start
            and last.row + last.num_lanes * last.rank == run.row
        ):
            runs[-1] = last._replace(num_lanes=last.num_lanes + 1)
        else:
            runs.append(run)
    return tuple(runs)
