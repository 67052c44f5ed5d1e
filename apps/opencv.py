"""OpenCV with its own logging disabled: the errors of this package are more specific than its decoders' output."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")

import cv2

__all__ = ["STDERR", "cv2", "quiet"]

STDERR = threading.Lock()
"""Held while stderr is redirected; code that prints while other threads may run `quiet` acquires it."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard output to stderr: some messages of OpenCV's video writer ignore the log level.

    One thread at a time: a second one would save and restore the first one's null device.
    """
    with STDERR:
        sys.stderr.flush()
        kept = os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nowhere)
