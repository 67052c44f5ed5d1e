"""What both stream handles keep: which results were read, and how long a broken connection is tried again."""

from __future__ import annotations

import time
from collections import deque

from vlora.client.values import FrameResult, FrameResults
from vlora.errors import DeadlineMissed, Disconnected

WAIT_S = 10.0  # how long the server holds a call that has to wait for room or for results

_RETRY_S = 30.0  # as long as a server keeps a stream without a connection
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class Unread:
    """Results that came and were not read yet. What was read is acknowledged by the next pull."""

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


class Retry:
    """Pauses between attempts to reach the server again, each longer, until the stream has expired there."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S
        self._until: float | None = None

    def pause_s(self, error: Disconnected) -> float:
        """How long to wait before the next attempt. Raises the error when there is none."""
        now = time.monotonic()
        # From the first failure on: the call may have been held by the server for a while before it.
        self._until = self._until or now + _RETRY_S
        if now >= self._until:
            raise error
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s


class Credit:
    """How long sending a frame may wait for room."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s

    def check(self, number: int) -> None:
        """Raises DeadlineMissed."""
        if time.monotonic() >= self._until:
            raise DeadlineMissed(
                f"frame {number} found no room within {self._timeout_s:g} s: read the stream's results while sending, "
                "or send fewer frames"
            )
