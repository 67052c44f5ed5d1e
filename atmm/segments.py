"""Lanes, which assign adapters to the tokens of a step; the plan built from them once per step; and its statistics over
one class of sites, by which strategies are chosen.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atmm.layers import Layout, Packed, Site, SiteGroup

MOST_WITH_ROOM = 2  # lanes per token: its own adapter and the merged adapter


class Lane(NamedTuple):
    """Tokens `[start, stop)` of the packed batch receive `sign` (+1 or -1) times the delta of adapter `key`."""

    key: str
    start: int
    stop: int
    sign: float = 1.0


class Strategy:
    """Adds the deltas of one plan at the sites of one class. `atmm.strategies.registry` lists all strategies.

    The attributes are None where a strategy lacks them.

    add_all: `add_all(y, x, group)` for all sites of a group at once, their outputs side by side in y [T, sum of d_out].
    None if calling the sites one after the other is faster.

    begin: `begin(x, site, packed)` starts what the site's group needs of x, beside the caller's next work.

    refill: `refill(plan)` loads the current lanes of a plan with room into the same addresses. It raises ValueError,
    and changes nothing, if the lanes do not fit. None if the strategy has to be prepared again instead.
    """

    __slots__ = ()

    add_all: Callable[[Tensor, Tensor, SiteGroup], None] | None = None
    begin: Callable[[Tensor, Site, Packed | None], None] | None = None
    refill: Callable[[SegmentPlan], None] | None = None

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None:
        raise NotImplementedError


class SegmentPlan:
    """The lanes of one step, used by every layer.

    Lanes may overlap: in mixed mode a token has the lane of its own adapter and the lane of the merged adapter with
    sign -1 (the deLoRA branch, V-LoRA section 4.4.2). Tokens without a lane are not modified. The plan selects a
    strategy at the first call of each class of sites and keeps it. A plan may be reused while its lanes are valid, from
    one thread.

    Args:
        lanes: in any order; empty lanes are dropped.
        strategy: the name of one of `atmm.STRATEGIES` to use for every site; None lets `atmm.dispatch` choose.
        room: the maximum number of lanes, at most two per token, for CUDA graphs. `refill` replaces the lanes of such a
            plan, and a captured graph uses the new lanes at its next replay. On a GPU it uses the Triton kernels, and
            adapters must be packed or in a factor table.
        max_rank: the highest rank of adapters that later lanes of a plan with room may have. Adapters that are packed
            or in the factor table when the plan is first used are included in any case.

    Raises:
        ValueError: for a lane outside the batch, a sign other than +1 and -1, or more lanes than `room`.
    """

    __slots__ = ("keys", "lanes", "max_rank", "num_tokens", "prepared", "room", "shared", "strategy")

    def __init__(
        self,
        num_tokens: int,
        lanes: Iterable[Lane],
        strategy: str | None = None,
        room: int | None = None,
        max_rank: int = 1,
    ) -> None:
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}; a plan covers 0 tokens or more")
        self.num_tokens = num_tokens
        self.room = room
        self.max_rank = max_rank
        self.strategy = strategy
        # By class of sites: packed sites by their layout, sites with a factor table by table and shape, all others by
        # device and dtype of their input.
        self.prepared: dict[Layout | tuple[Any, ...], Strategy] = {}
        self.shared: dict[tuple[Any, ...], Any] = {}  # tables that strategies of this plan use together
        self.lanes = self._checked(lanes)
        self.keys = frozenset(lane.key for lane in self.lanes)

    def refill(self, lanes: Iterable[Lane]) -> None:
        """Replace the lanes, at the same addresses. Only for a plan with room.

        Raises:
            ValueError: as the constructor, and for adapters that captured kernels cannot read: missing from the packed
                copy or the factor table that the plan uses, or of a higher rank. The plan is then unchanged.
            RuntimeError: while a CUDA graph is captured.
        """
        if self.room is None:
            raise ValueError("a plan without room cannot be refilled; set room to the maximum number of lanes")
        for sites in self.prepared:
            place = sites if isinstance(sites, Layout) else sites[0]
            check_not_capturing(place if isinstance(place, torch.device) else place.device)
        before = self.lanes, self.keys
        self.lanes = self._checked(lanes)
        self.keys = frozenset(lane.key for lane in self.lanes)
        try:
            self._refill()
        except ValueError:
            self.lanes, self.keys = before
            self._refill()
            raise

    def _refill(self) -> None:
        for sites in self.prepared:
            if isinstance(sites, Layout) and not self.keys <= sites.keys:
                missing = ", ".join(sorted(self.keys - sites.keys))
                raise ValueError(f"lanes use adapters that are not packed: {missing}; pack them and capture again")
        for sites, strategy in list(self.prepared.items()):
            if strategy.refill is not None:
                strategy.refill(self)
            else:
                del self.prepared[sites]  # such a strategy cannot be part of a captured graph

    def _checked(self, lanes: Iterable[Lane]) -> tuple[Lane, ...]:
        """The lanes with tokens, sorted by position."""
        lanes, num_tokens = tuple(lanes), self.num_tokens
        for lane in lanes:
            if not 0 <= lane.start <= lane.stop <= num_tokens:
                raise ValueError(
                    f"lane {lane} is outside the batch of {num_tokens} tokens; give 0 <= start <= stop <= num_tokens"
                )
            if lane.sign not in (1, -1):
                raise ValueError(f"lane {lane} has sign {lane.sign}; give +1 to add the delta, -1 to subtract it")
        lanes = tuple(sorted((lane for lane in lanes if lane.stop > lane.start), key=_place))
        if self.room is not None and (len(lanes) > self.room or _most_at_a_token(lanes) > MOST_WITH_ROOM):
            raise ValueError(
                f"{len(lanes)} lanes, up to {_most_at_a_token(lanes)} per token; the plan has room for {self.room}, "
                f"{MOST_WITH_ROOM} per token"
            )
        return lanes


def check_not_capturing(device: torch.device) -> None:
    """Raises RuntimeError while a CUDA graph is captured on this device.

    A plan's tables are copied from host memory that is freed afterwards. A captured copy would read that memory again
    at every replay.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a plan cannot be prepared or refilled during the capture of a CUDA graph; run the step once before the "
            "capture, and refill the plan between replays"
        )


def _place(lane: Lane) -> tuple[int, int]:
    return lane.start, lane.stop


def _most_at_a_token(lanes: Iterable[Lane]) -> int:
    edges = sorted(edge for lane in lanes for edge in ((lane.start, 1), (lane.stop, -1)))
    return max(itertools.accumulate(change for _, change in edges), default=0)


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
