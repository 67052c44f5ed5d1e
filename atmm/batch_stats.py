"""What one plan asks of one class of sites: the facts that a strategy is prepared from and chosen on."""

from __future__ import annotations

import functools
from typing import NamedTuple

from atmm.layers import Layout
from atmm.segments import SegmentPlan


class Run(NamedTuple):
    """Lanes that one batched product serves without padding or copies.

    `num_lanes` lanes of `length` tokens each, one after the other from token `start`; their factors are `rank` rows
    each, one after the other from the site's packed row `row`; all have one sign.
    """

    start: int
    num_lanes: int
    length: int
    row: int
    rank: int
    sign: float

    def goes_on(self, lane: Run) -> bool:
        """Whether `lane`, a run of one, may be the next lane of this one."""
        return (
            (self.length, self.rank, self.sign) == (lane.length, lane.rank, lane.sign)
            and self.start + self.num_lanes * self.length == lane.start
            and self.row + self.num_lanes * self.rank == lane.row
        )


class Survey:
    """One plan against one layout that holds all its adapters.

    lanes: in the plan's order, those whose adapter targets a site of the group. keys: their adapters. live: the sites
    they target. start, stop: the smallest range of tokens that holds them all; part: the same, None when it is the
    whole batch. room: the plan's; with it the range is the whole batch, and live is every site that an adapter targets,
    whatever the lanes are.
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
    def runs(self) -> tuple[tuple[Run, ...], ...]:
        """Per site, its lanes in as few runs as their order allows."""
        by_site = []
        for spans in self.layout.spans:
            runs: list[Run] = []
            for key, start, stop, sign in self.lanes:
                span = spans.get(key)
                if span is None or not span.rank:
                    continue
                lane = Run(start, 1, stop - start, span.start, span.rank, sign)
                if runs and runs[-1].goes_on(lane):
                    runs[-1] = runs[-1]._replace(num_lanes=runs[-1].num_lanes + 1)
                else:
                    runs.append(lane)
            by_site.append(tuple(runs))
        return tuple(by_site)
