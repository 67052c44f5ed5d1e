"""Handling of Ctrl-C and termination signals: finish the work in progress, or exit immediately with one line."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from vlora.errors import VLoraError

INTERRUPTED = 130
_NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_SHELLS_ADD = 128  # added to a signal's number to form the exit code


class Stopped(KeyboardInterrupt):
    """An interrupt or a termination signal, raised in the main thread with its number."""


@contextlib.contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """A block with this handler of both signals."""
    before = {number: signal.signal(number, handler) for number in _NAMES}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that the first interrupt or termination signal sets. The second signal ends the process."""
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)
        stop.set()
        # Not by sys.stderr: the signal may interrupt a write to it, and a second one inside raises RuntimeError.
        os.write(2, b"stopping: finishing the work in progress; interrupt again to exit immediately\n")

    with _handled(on_signal):
        yield stop


@contextlib.contextmanager
def until_stopped() -> Iterator[threading.Event]:
    """As `stopping`. After a signal the command ends with exit code 130, and an error in the block is only printed."""
    with stopping() as stop:
        try:
            yield stop
        except VLoraError as error:
            if not stop.is_set():
                raise
            print(f"error: {error}", file=sys.stderr)
        if stop.is_set():
            sys.exit(INTERRUPTED)


@contextlib.contextmanager
def ends_with(line: Callable[[], str]) -> Iterator[None]:
    """Leave the block immediately on an interrupt or a termination signal, and end the command with one line on
    stderr.

    Exit code 130 or 143, as shells expect. A second signal does not wait for the end of the block.

    Args:
        line: the rest of the line, after "interrupted: " or "terminated: ". Called once, after the block.
    """
    stopped: int | None = None

    def last_words(number: int) -> None:
        print(f"{_NAMES[signal.Signals(number)]}: {line()}", file=sys.stderr, flush=True)

    def on_signal(number: int, frame: object) -> None:
        nonlocal stopped
        if stopped is not None:
            last_words(number)
            os._exit(_SHELLS_ADD + number)
        stopped = number
        raise Stopped(number)

    with _handled(on_signal):
        try:
            yield
        except (
            BaseException
        ):  # a native library may turn Stopped into an error of its own: safetensors, into ValueError
            if stopped is None:
                raise
            for number in _NAMES:
                signal.signal(number, signal.SIG_IGN)  # the line is printed once, and the exit code is this signal's
            last_words(stopped)
            sys.exit(_SHELLS_ADD + stopped)
