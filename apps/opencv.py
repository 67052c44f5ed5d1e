"""OpenCV, kept quiet: what a broken file makes its decoders print says less than our own errors."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")

import cv2

__all__ = ["cv2", "quiet"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is written to stderr meanwhile: some remarks of OpenCV's video writer heed no log level."""
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
