"""What commands do on Ctrl-C and on a termination signal: finish what is under way, or end at once with a line."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

INTERRUPTED = 130
_NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_SHELLS_ADD = 128  # to a signal's number, for the exit code of what it ended


class Stopped(KeyboardInterrupt):
    """An interrupt or a termination signal, raised where the main thread is. signal: its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


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


@contextlib.contextmanager
def ends_with(line: Callable[[], str]) -> Iterator[None]:
    """Leave the block at once on an interrupt or a termination signal, and the command with one line on stderr.

    Exit code 130 or 143, as shells expect. A second signal does not wait for the block to be left.

    Args:
        line: the rest of the line, behind "interrupted: " or "terminated: ". Called once, after the block.
    """
    stopped = False

    def last_words(number: int) -> None:
        print(f"{_NAMES[signal.Signals(number)]}: {line()}", file=sys.stderr, flush=True)

    def on_signal(number: int, frame: object) -> None:
        nonlocal stopped
        if stopped:
            last_words(number)
            os._exit(_SHELLS_ADD + number)
        stopped = True
        raise Stopped(number)

    before = {number: signal.signal(number, on_signal) for number in _NAMES}
    try:
        yield
    except Stopped as error:
        for number in _NAMES:
            signal.signal(number, signal.SIG_IGN)  # the line is printed once, and the exit code is this signal's
        last_words(error.signal)
        sys.exit(_SHELLS_ADD + error.signal)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
