"""Which tokens get which adapter's delta: built once per step, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Lane(NamedTuple):
    """Tokens [start, stop) get `sign` times the delta of adapter `key`. Lanes may overlap: deltas add up (deLoRA)."""

    key: str
    start: int
    stop: int
    sign: float


class SegmentPlan:
    """The lanes of one packed batch of `num_tokens` tokens, and what was worked out for them once (choices, masks).

    Raises ValueError for a lane outside the batch.
    """

    def __init__(self, num_tokens: int, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            if not 0 <= lane.start < lane.stop <= num_tokens:
                raise ValueError(
                    f"lane of adapter {lane.key!r} covers tokens [{lane.start}, {lane.stop}), "
                    f"but the batch has {num_tokens} tokens and a lane needs at least one"
                )
        self.num_tokens = num_tokens
        self.lanes = tuple(lanes)
        self.keys = frozenset(lane.key for lane in lanes)
        # Strategies, masks and shared shrinks of this step, keyed by what they depend on.
        self.memo: dict[Any, Any] = {}

    @property
    def even(self) -> bool:
        """The lanes cut the batch into equal parts, in order, each adapter once."""
        share = self.num_tokens // max(1, len(self.lanes))
        return len(self.keys) == len(self.lanes) and all(
            lane.start == i * share and lane.stop == (i + 1) * share for i, lane in enumerate(self.lanes)
        )
