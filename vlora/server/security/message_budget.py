"""How many bytes of messages the server holds, over all callers and both surfaces."""

from __future__ import annotations

import threading


class ByteBudget:
    """Bytes that were received and whose requests have not ended. Used by any number of threads."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held = 0
        self._changed = threading.Condition()

    def take(self, count: int, wait_s: float = 0.0) -> bool:
        """Count bytes in, waiting up to `wait_s` for room; False, and nothing counted, when there is none."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._held + count <= self.most, wait_s):
                return False
            self._held += count
            return True

    def give(self, count: int) -> None:
        """Count bytes out."""
        with self._changed:
            self._held -= count
            assert self._held >= 0, "more bytes were given back than taken"
            self._changed.notify_all()
