"""Ctrl-C, twice: the first lets what is under way finish, the second ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

INTERRUPTED = 130


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that the first interrupt or termination signal sets. The second one ends the process."""
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)
        stop.set()
        print("stopping: what is under way is finished; once more ends at once", file=sys.stderr)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
