"""OpenCV with its own logging disabled (the errors of this project are more specific than its decoders' output), and
the reader of videos and cameras.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from vlora.errors import BadImage

os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")

import cv2

__all__ = ["STDERR", "Video", "clock", "cv2", "quiet"]

STDERR = threading.Lock()
"""Held while stderr is redirected; code that prints while other threads may run `quiet` acquires it."""

clock = time.monotonic

_ASSUMED_RATE = 30.0  # of frames without time stamps in a video without a declared rate
_RESTART_S = 1.0  # time stamps that go back by more start again, as in files that were joined
_LOST_S = 40.0  # a camera whose stamps differ more from the clock has others; OpenCV waits 30 s for a frame


class Video:
    """The frames of a video or a camera in order, each with its time.

    The time in a file counts from its first frame, by the container's time stamps: declared rates and numbers of frames
    are wrong if frames have different durations. A frame without a stamp follows the one before at the declared rate.
    The time of a camera's frame is its stamp too, as frames may arrive in bursts; or when it arrives, if the camera
    sends no stamps: for those of MJPEG over HTTP and of devices OpenCV assumes a rate. Times never decrease.

    Attributes:
        rate: declared frames per second, often an average; None if there is none.
    """

    def __init__(self, address: str | int, since: float | None = None) -> None:
        """since: of a camera, the value of `clock` from which its times count; None for a file.

        Raises:
            BadImage: OpenCV cannot open it.
        """
        try:
            if isinstance(address, str):
                address.encode()  # OpenCV aborts on others
            self._capture = cv2.VideoCapture(address)
        except UnicodeEncodeError as error:
            raise BadImage("its name is not UTF-8; rename it") from error
        except cv2.error as error:  # a number that is no C int
            raise BadImage("OpenCV does not accept the address") from error
        if not self._capture.isOpened():
            self._capture.release()
            raise BadImage("it is not a video that this machine can decode")
        declared = self._capture.get(cv2.CAP_PROP_FPS)
        self.rate = declared if 0 < declared < 1000 else None
        self._since = since
        mjpeg = self._capture.get(cv2.CAP_PROP_FOURCC) == cv2.VideoWriter.fourcc(*"MJPG")
        endless = self._capture.get(cv2.CAP_PROP_FRAME_COUNT) <= 0
        self._stamped = since is None or (isinstance(address, str) and not (mjpeg and endless))

    def __enter__(self) -> Video:
        return self

    def __exit__(self, *_: object) -> None:
        self._capture.release()

    def __iter__(self) -> Iterator[float]:
        """The time of each frame, in seconds; `picture` decodes the frame."""
        step = 1 / (self.rate or _ASSUMED_RATE)
        time_s, shift, ahead_s = 0.0, None, 0.0
        while self._capture.grab():
            now = None if self._since is None else clock() - self._since
            stamp = self._capture.get(cv2.CAP_PROP_POS_MSEC) / 1e3
            if shift is None:
                time_s = now or 0.0
                shift = time_s - stamp
            elif self._stamped and stamp > 0:
                known = stamp + shift
                restarted = known < time_s - _RESTART_S
                if now is not None:
                    restarted |= now - known > _LOST_S or known - now > ahead_s + _LOST_S
                if restarted:
                    known = time_s + step if now is None else now
                    shift = known - stamp
                time_s = max(time_s, known)
            else:
                time_s = time_s + step if now is None else max(time_s, now)
            ahead_s = 0.0 if now is None else max(0.0, time_s - now)
            yield round(time_s, 6)

    def picture(self) -> cv2.typing.MatLike | None:
        """The current frame, BGR; None if it cannot be decoded."""
        decoded, picture = self._capture.retrieve()
        return picture if decoded else None


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
