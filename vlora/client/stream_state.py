"""State shared by both stream handles: which results were read, and how long a broken connection is retried."""

from __future__ import annotations

import time
from collections import deque

from vlora.client.values import FrameResult, FrameResults
from vlora.errors import DeadlineMissed, Disconnected

WAIT_S = 10.0  # how long the server holds a call that waits for room or for results

RETRY_S = 30.0  # the time that a server keeps a stream without a connection
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class UnreadResults:
    """Results received but not yet read. The next pull acknowledges those that were read."""

    def __init__(self) -> None:
        self._results: deque[FrameResult] = deque()
        self.last_read = -1
        self.finished = False

    def __bool__(self) -> bool:
        return bool(self._results)

    def add(self, part: FrameResults) -> None:
        self._results.extend(part.results)
        self.finished = part.finished

    def read(self) -> FrameResult:
        result = self._results.popleft()
        self.last_read = result.number
        return result


class ReconnectBackoff:
    """Increasing pauses between attempts to reconnect, until the stream has expired on the server."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S
        self._until: float | None = None

    def pause_s(self, error: Disconnected) -> float:
        """Time to wait before the next attempt. Raises the error when no attempts remain."""
        now = time.monotonic()
        # Counted from the first failure, because the server may have held the call for a while before it.
        self._until = self._until or now + RETRY_S
        if now >= self._until:
            raise error
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s


class SendTimeout:
    """Limits how long sending a frame may wait for room."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s

    def check(self, number: int) -> None:
        """Raises DeadlineMissed after the limit."""
        if time.monotonic() >= self._until:
            raise DeadlineMissed(
                f"frame {number} found no room within {self._timeout_s:g} s: read the stream's results while sending, "
                "or send fewer frames"
            )
