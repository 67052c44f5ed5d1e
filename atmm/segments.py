"""Which tokens of a step get which adapter: lanes, and the plan built from them once per step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from atmm.layers import Layout, Packed, Site, SiteGroup

MOST_WITH_ROOM = 2  # lanes at a token: its own adapter's, and the merged one's


class Lane(NamedTuple):
    """Tokens `[start, stop)` of the packed batch get `sign` (+1 or -1) times the delta of adapter `key`."""

    key: str
    start: int
    stop: int
    sign: float = 1.0


class Strategy(Protocol):
    """Adds the deltas of one plan at the sites of one class; `atmm.strategies.registry` has them all."""

    adds_transposed: bool  # as fast into an output that lies transposed as into rows

    @property
    def add_all(self) -> Callable[[Tensor, Tensor, SiteGroup], None] | None:
        """`add_all(y, x, group)` for all sites of a group at once, their outputs side by side in y [T, sum of d_out];
        None where sites are better served one after the other."""

    @property
    def refill(self) -> Callable[[SegmentPlan, Layout], None] | None:
        """`refill(plan, layout)` takes over what a plan with room says now, at the same addresses; None where a
        strategy had better be prepared anew."""

    def __call__(self, y: Tensor, x: Tensor, site: Site, packed: Packed | None) -> None: ...


class SegmentPlan:
    """The lanes of one step, used by every layer.

    Lanes may overlap: in mixed mode a token has its own adapter's lane and the merged adapter's with sign -1 (the
    deLoRA branch, V-LoRA section 4.4.2). Tokens without a lane are left alone. How each class of sites is computed is
    decided at the class's first call and kept here, so a plan may be used again for as long as its lanes are right,
    by one thread.

    `strategy` forces one of `atmm.STRATEGIES` by name wherever an adapter is applied; None lets `atmm.dispatch`
    choose.

    `room` is for CUDA graphs: with so many lanes at most, two of them at a token, the plan may be given others by
    `refill`, and what was captured with it computes these when it is replayed. On a GPU such a plan is for packed
    adapters and Triton's kernels.

    Raises ValueError for a lane outside the batch, a sign other than +1 and -1, and lanes that the room does not hold.
    """

    __slots__ = ("keys", "lanes", "num_tokens", "prepared", "room", "strategy")

    def __init__(
        self, num_tokens: int, lanes: Iterable[Lane], strategy: str | None = None, room: int | None = None
    ) -> None:
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}; a plan covers 0 tokens or more")
        self.num_tokens = num_tokens
        self.room = room
        self.strategy = strategy
        # By class of sites: packed ones by their layout, all others by device and dtype of what they read.
        self.prepared: dict[Layout | tuple[torch.device, torch.dtype], Strategy] = {}
        self.lanes = self._checked(lanes)
        self.keys = frozenset(lane.key for lane in self.lanes)

    def refill(self, lanes: Iterable[Lane]) -> None:
        """Other lanes from now on, at the addresses of those before. Only for a plan with room.

        Raises ValueError as the plan itself does, and for adapters that are not packed where those before were; the
        plan is as it was then.
        """
        if self.room is None:
            raise ValueError("a plan without room cannot be given other lanes; make it with room for the most of them")
        lanes = self._checked(lanes)
        keys = frozenset(lane.key for lane in lanes)
        for sites in self.prepared:
            if isinstance(sites, Layout) and not keys <= sites.keys:
                missing = ", ".join(sorted(keys - sites.keys))
                raise ValueError(f"lanes of {missing}, which are not packed; pack them, and capture anew")
        self.lanes, self.keys = lanes, keys
        for sites, strategy in list(self.prepared.items()):
            if isinstance(sites, Layout) and strategy.refill is not None:
                strategy.refill(self, sites)
            else:
                del self.prepared[sites]  # nothing of it can have been captured

    def _checked(self, lanes: Iterable[Lane]) -> tuple[Lane, ...]:
        """Those that have tokens, by their place."""
        lanes, num_tokens = tuple(lanes), self.num_tokens
        for lane in lanes:
            if not 0 <= lane.start <= lane.stop <= num_tokens:
                raise ValueError(
                    f"lane {lane} does not lie in the batch of {num_tokens} tokens; "
                    "give 0 <= start <= stop <= num_tokens"
                )
            if lane.sign not in (1, -1):
                raise ValueError(f"lane {lane} has sign {lane.sign}; give +1 to add the delta, -1 to take it away")
        lanes = tuple(sorted((lane for lane in lanes if lane.stop > lane.start), key=_place))
        if self.room is not None and (len(lanes) > self.room or _most_at_a_token(lanes) > MOST_WITH_ROOM):
            raise ValueError(
                f"{len(lanes)} lanes, up to {_most_at_a_token(lanes)} at a token; the plan has room for {self.room}, "
                f"{MOST_WITH_ROOM} at a token"
            )
        return lanes


def _place(lane: Lane) -> tuple[int, int]:
    return lane.start, lane.stop


def _most_at_a_token(lanes: Iterable[Lane]) -> int:
    edges = sorted(edge for lane in lanes for edge in ((lane.start, 1), (lane.stop, -1)))
    return max(itertools.accumulate(change for _, change in edges), default=0)
