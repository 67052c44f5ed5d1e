"""Limit on the bytes of messages in memory, over all callers of RPyC and HTTP."""

from __future__ import annotations

import threading


class ByteBudget:
    """Received bytes of requests that have not ended. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held = 0
        self._changed = threading.Condition()

    def take(self, count: int, wait_s: float = 0.0) -> bool:
        """Reserve bytes, waiting up to `wait_s` for room. Returns False, with nothing reserved, when there is none."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._held + count <= self.most, wait_s):
                return False
            self._held += count
            return True

    def give(self, count: int) -> None:
        """Release bytes."""
        with self._changed:
            self._held -= count
            assert self._held >= 0, "more bytes were released than taken"
            self._changed.notify_all()
