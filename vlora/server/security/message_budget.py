"""Limit on the bytes of messages in memory, over all connections of RPyC and HTTP."""

from __future__ import annotations

import threading


class ByteBudget:
    """Received bytes of requests that have not ended. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes that are reserved now."""
        return self._used

    def reserve(self, num_bytes: int, wait_s: float = 0.0) -> bool:
        """Reserve bytes, waiting up to `wait_s` for room. Returns False, with nothing reserved, when there is none."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._used + num_bytes <= self.limit, wait_s):
                return False
            self._used += num_bytes
            return True

    def release(self, num_bytes: int) -> None:
        """Release reserved bytes."""
        with self._changed:
            self._used -= num_bytes
            assert self._used >= 0, "more bytes were released than reserved"
            self._changed.notify_all()


class ByteCharge:
    """The bytes that one message has reserved in a budget. Used from one thread at a time."""

    def __init__(self, budget: ByteBudget, num_bytes: int = 0) -> None:
        self._budget = budget
        self.num_bytes = num_bytes

    def add(self, num_bytes: int, wait_s: float) -> bool:
        """Reserve more bytes, waiting up to `wait_s` for room. Returns False, with nothing reserved, without room."""
        if not self._budget.reserve(num_bytes, wait_s):
            return False
        self.num_bytes += num_bytes
        return True

    def shrink_to(self, num_bytes: int) -> None:
        """Release the bytes above `num_bytes`."""
        spare, self.num_bytes = self.num_bytes - num_bytes, num_bytes
        self._budget.release(spare)

    def move(self) -> ByteCharge:
        """Move the bytes to a new charge, which must be released instead of this one."""
        moved = ByteCharge(self._budget, self.num_bytes)
        self.num_bytes = 0
        return moved

    def release(self) -> None:
        """Release all bytes. Has no effect when they were released or moved already."""
        if self.num_bytes:
            self.shrink_to(0)
