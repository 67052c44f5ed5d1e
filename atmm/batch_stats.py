"""Statistics of one plan over one class of sites. Strategies are chosen by them and prepared from them."""

from __future__ import annotations

import functools
from typing import NamedTuple

from atmm.layers import Layout
from atmm.segments import SegmentPlan


class LaneRun(NamedTuple):
    """Consecutive lanes that one batched product computes without padding or copies.

    The run has `num_lanes` lanes of `length` tokens each, starting at token `start`. Their factors have `rank` rows
    each, starting at the site's packed row `row`. All lanes have the same sign.
    """

    start: int
    num_lanes: int
    length: int
    row: int
    rank: int
    sign: float

    def continues_with(self, lane: LaneRun) -> bool:
        return (
            (self.length, self.rank, self.sign) == (lane.length, lane.rank, lane.sign)
            and self.start + self.num_lanes * self.length == lane.start
            and self.row + self.num_lanes * self.rank == lane.row
        )


class BatchStats:
    """Statistics of one plan for one layout, which holds all adapters of the plan.

    lanes: the lanes of adapters that target a site of the group, in the plan's order. keys: their adapters. live: the
    sites that these adapters target. start, stop: the smallest token range that covers the lanes. part: this range as
    a slice, None for the whole batch. room: the plan's room. With room, the range is the whole batch and `live` has
    every site that any packed adapter targets, independent of the current lanes.
    """

    def __init__(self, plan: SegmentPlan, layout: Layout) -> None:
        self.layout = layout
        self.lanes = tuple(lane for lane in plan.lanes if lane.key in layout.targeting)
        self.keys = {lane.key for lane in self.lanes}
        self.room = plan.room
        reached = self.keys if self.room is None else layout.targeting
        self.live = tuple(
            index for index, site in enumerate(layout.spans) if any(key in site and site[key].rank for key in reached)
        )
        if self.room is None:
            self.start = min((lane.start for lane in self.lanes), default=0)
            self.stop = max((lane.stop for lane in self.lanes), default=0)
        else:
            self.start, self.stop = 0, plan.num_tokens
        self.part = None if self.num_tokens == plan.num_tokens else slice(self.start, self.stop)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @functools.cached_property
    def runs(self) -> tuple[tuple[LaneRun, ...], ...]:
        """Per site, the lanes joined into as few runs as their order allows."""
        by_site = []
        for spans in self.layout.spans:
            runs: list[LaneRun] = []
            for key, start, stop, sign in self.lanes:
                span = spans.get(key)
                if span is None or not span.rank:
                    continue
                lane = LaneRun(start, 1, stop - start, span.start, span.rank, sign)
                if runs and runs[-1].continues_with(lane):
                    runs[-1] = runs[-1]._replace(num_lanes=runs[-1].num_lanes + 1)
                else:
                    runs.append(lane)
            by_site.append(tuple(runs))
        return tuple(by_site)
