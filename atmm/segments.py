"""Which tokens of a step get which adapter: lanes, and the plan built from them once per step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from atmm.sites import Layout
    from atmm.strategies import Strategy


class Lane(NamedTuple):
    """Tokens `[start, stop)` of the packed batch get `sign` (+1 or -1) times the delta of adapter `key`."""

    key: str
    start: int
    stop: int
    sign: float = 1.0


class SegmentPlan:
    """The lanes of one step, used by every layer.

    Lanes may overlap: in mixed mode a token has its own adapter's lane and the merged adapter's with sign -1 (the
    deLoRA branch, V-LoRA section 4.4.2). Tokens without a lane are left alone. How each class of sites is computed is
    decided at the class's first call and kept here, so a plan may be used again for as long as its lanes are right,
    by one thread.

    `strategy` forces one of `atmm.STRATEGIES` by name wherever an adapter is applied; None lets `atmm.selection`
    choose.

    Raises ValueError for a lane outside the batch or a sign other than +1 and -1.
    """

    __slots__ = ("keys", "lanes", "num_tokens", "prepared", "strategy")

    def __init__(self, num_tokens: int, lanes: Iterable[Lane], strategy: str | None = None) -> None:
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}; a plan covers 0 tokens or more")
        lanes = tuple(lanes)
        for lane in lanes:
            if not 0 <= lane.start <= lane.stop <= num_tokens:
                raise ValueError(
                    f"lane {lane} does not lie in the batch of {num_tokens} tokens; "
                    "give 0 <= start <= stop <= num_tokens"
                )
            if lane.sign not in (1, -1):
                raise ValueError(f"lane {lane} has sign {lane.sign}; give +1 to add the delta, -1 to take it away")
        self.num_tokens = num_tokens
        self.lanes = tuple(sorted((lane for lane in lanes if lane.stop > lane.start), key=_place))
        self.keys = frozenset(lane.key for lane in self.lanes)
        self.strategy = strategy
        self.prepared: dict[Layout | None, Strategy] = {}  # by class of sites; None is every unpacked site


def _place(lane: Lane) -> tuple[int, int]:
    return lane.start, lane.stop
