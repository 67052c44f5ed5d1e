"""One engine snapshot shared by all viewers: at most two per second, for any number of viewers."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from vlora.engine.snapshot import EngineSnapshot, StepRecord

INTERVAL_S = 0.5
MAX_STEPS = 2000
"""Steps that are kept for new viewers."""


class SnapshotSource(Protocol):
    """The part of `FrontEnd` that a feed uses."""

    async def snapshot(self, since: int = 0) -> EngineSnapshot:
        """The engine's snapshot, with the steps after number `since`."""
        ...


class SnapshotFeed:
    """Takes a snapshot on request only."""

    def __init__(self, source: SnapshotSource, interval_s: float = INTERVAL_S) -> None:
        self._source = source
        self._interval_s = interval_s
        self._taken_at = 0.0
        self._snapshot: EngineSnapshot | None = None
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._lock = asyncio.Lock()

    async def read(self, since: int) -> tuple[EngineSnapshot, list[StepRecord]]:
        """The last snapshot, refreshed when it is old, and the steps after number `since`. Raises EngineDead."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if self._snapshot is None or now - self._taken_at >= self._interval_s:
                self._taken_at, self._snapshot = now, None  # on failure, do not serve the old snapshot
                self._snapshot = await self._source.snapshot(self._steps[-1].number if self._steps else 0)
                if self._steps and self._snapshot.stats.num_steps < self._steps[-1].number:
                    self._steps.clear()  # the engine restarted and counts from 1
                self._steps.extend(self._snapshot.steps)
            return self._snapshot, [step for step in self._steps if step.number > since]
