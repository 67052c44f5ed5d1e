"""OpenCV, kept quiet: what a broken file makes its decoders print says less than our own errors."""

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
"""Held while nothing can be written there; whoever has something to say while others may be `quiet` holds it."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is written to stderr meanwhile: some remarks of OpenCV's video writer heed no log level.

    One at a time: what a second one kept and gave back would be the first one's nowhere.
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
