"""How much other work on the machine delayed a measurement."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_MOST = 0.05  # of the time; a quiet machine has less than a hundredth


class Contention:
    """The time in which threads of this process were ready to run and had no core, since this was made.

    Only Linux reports it; elsewhere a measurement always counts as undisturbed.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._before_s = _waited_s()

    def disturbs(self) -> bool:
        """Whether timings since then are those of a busy machine."""
        return _waited_s() - self._before_s > _MOST * (time.monotonic() - self._began_s)


def _waited_s() -> float:
    """Summed over the threads that exist now (proc(5): schedstat, nanoseconds)."""
    waited = 0
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that ended meanwhile
            waited += int((task / "schedstat").read_text().split()[1])
    return waited / 1e9
