"""Detection of measurements delayed by other load on the machine."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

TASKS = Path("/proc/self/task")
_MOST = 0.05  # share of the time; an idle machine has less than 0.01


class Contention:
    """The time since construction in which threads of this process were runnable but had no core.

    Only Linux reports it; on other systems every measurement counts as undisturbed.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._before_s = _waited_s()

    def disturbs(self) -> bool:
        """Whether timings since construction were disturbed by other load."""
        return _waited_s() - self._before_s > _MOST * (time.monotonic() - self._began_s)


def _waited_s() -> float:
    """Run-queue wait in seconds, summed over the current threads (proc(5): schedstat, nanoseconds)."""
    waited = 0
    for task in TASKS.iterdir() if TASKS.is_dir() else ():
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
            waited += int((task / "schedstat").read_text().split()[1])
    return waited / 1e9
