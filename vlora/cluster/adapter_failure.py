"""An adapter that a replica cannot serve, and the time of the next attempt."""

from __future__ import annotations

import asyncio

from vlora.types import ErrorValue

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class Failure:
    """Why a replica is not as desired with one adapter, and when that is tried again.

    Attributes:
        bars: Whether it gets no requests of the adapter because of it.
        due_s: The time of the next attempt, in the loop's clock.
        pause_s: The time between two attempts.
    """

    def __init__(self, error: ErrorValue, before: Failure | None, *, bars: bool) -> None:
        self.error = error
        self.bars = bars
        self.pause_s: float = FIRST_PAUSE_S if before is None else min(LONGEST_PAUSE_S, 2 * before.pause_s)
        self.due_s = asyncio.get_running_loop().time() + self.pause_s
