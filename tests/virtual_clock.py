"""An event loop with a clock that advances only while it is idle: timers do not depend on the machine's load."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _IdleSelector(selectors.DefaultSelector):
    """Reports a wait as over at once, and adds its length to `elapsed_s`."""

    elapsed_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:  # without a timer, only a file or another thread can wake the loop
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self.elapsed_s += timeout
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Its `time()` is in seconds since its start. For tests without sockets and threads."""

    def __init__(self) -> None:
        self._idle_selector = _IdleSelector()
        super().__init__(self._idle_selector)

    def time(self) -> float:
        return self._idle_selector.elapsed_s

    def pause(self, seconds: float) -> None:
        """Let time pass while nothing runs, as when a caller blocks the loop."""
        self._idle_selector.elapsed_s += seconds
