"""OpenCV with its own logging disabled (the errors of this project are more specific than its decoders' output), and
the reader of videos and cameras.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from vlora.errors import BadImage

os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")

import cv2

__all__ = ["STDERR", "Video", "clock", "cv2", "frame_times", "frames_at", "quiet"]

STDERR = threading.Lock()
"""Held while stderr is redirected; code that prints while other threads may run `quiet` acquires it."""

clock = time.monotonic

_ASSUMED_RATE = 30.0  # of frames without time stamps in a video without a declared rate
_RESTART_S = 1.0  # time stamps that go back by more start again, as in files that were joined
_LOST_S = 100.0  # stamps of a camera that fall behind by more are no times; stalls of 40 s occur
_OPENING_S, _FAST_S = 5.0, 0.01  # frames of a camera are skipped for at most the first time, if read in the second
_PARSED = {cv2.VideoWriter.fourcc(*name) for name in ("h264", "H264", "avc1", "hevc", "HEVC", "hvc1", "hev1")}
_SAME_S = 5e-4  # by which the times of a frame differ at most
_DRIFT = 2e-4  # seconds per second by which a camera's clock may be slower


class Video:
    """The frames of a video or a camera in order, each with its time.

    The time in a file counts from its first frame, by the container's time stamps: declared rates and numbers of frames
    are wrong if frames have different durations. A frame without a stamp follows the one before at the declared rate.
    The time of a camera's frame is its stamp too, as frames may arrive in bursts, counted from the frame that arrived
    with the least delay (of H.264 and H.265, from the arrival of the next one); or when it arrives, if the camera sends
    no stamps: for those of MJPEG over HTTP and of devices OpenCV assumes a rate. Frames that waited while it was opened
    are left out. Times never decrease.

    Attributes:
        rate: declared frames per second, often an average; None if there is none.
    """

    def __init__(self, address: str | int, since: float | None = None) -> None:
        """since: of a camera, the value of `clock` from which its times count; None for a file.

        Raises:
            BadImage: OpenCV cannot open it.
        """
        # Several threads decode several frames at once: each would arrive frames later, seconds at night.
        arriving = isinstance(address, str) and since is not None and "://" in address
        self._capture = _opened(address, cv2.CAP_ANY, *[cv2.CAP_PROP_N_THREADS, 1] * arriving)
        declared = self._capture.get(cv2.CAP_PROP_FPS)
        self.rate = declared if 0 < declared < 1000 else None
        codec = int(self._capture.get(cv2.CAP_PROP_FOURCC))
        mjpeg = codec == cv2.VideoWriter.fourcc(*"MJPG")
        endless = self._capture.get(cv2.CAP_PROP_FRAME_COUNT) <= 0
        self._since = since
        self._by_clock = since is not None and (endless or not isinstance(address, str))  # no file behind a URL
        rtsp = isinstance(address, str) and address.startswith("rtsp")
        self._stamped = isinstance(address, str) and (rtsp or not (mjpeg and self._by_clock))
        # FFmpeg's parsers know the end of such a frame by the beginning of the next one.
        self._one_behind = rtsp and codec in _PARSED

    def __enter__(self) -> Video:
        return self

    def __exit__(self, *_: object) -> None:
        self._capture.release()

    def __iter__(self) -> Iterator[float]:
        """The time of each frame, in seconds; `picture` decodes the frame."""
        step = 1 / (self.rate or _ASSUMED_RATE)
        time_s, read_s, first_s, last, shift = 0.0, 0.0, 0.0, 0.0, None
        opening = self._by_clock and self._stamped
        while self._capture.grab():
            stamp = self._capture.get(cv2.CAP_PROP_POS_MSEC) / 1e3
            before, now = read_s, 0.0 if self._since is None else clock() - self._since
            read_s = now if self._by_clock else time_s + step  # the time of a frame without a stamp
            if shift is None:
                time_s = first_s = before = read_s = now
                shift = time_s - stamp
            elif not self._stamped or stamp <= 0:
                time_s = max(time_s, read_s)
            else:
                if self._by_clock:  # some frames travel longer
                    passed_on = self._one_behind and read_s - before < _RESTART_S  # and did not wait for a stall's end
                    arrived = before if passed_on else read_s
                    shift = min(shift + _DRIFT * (read_s - before), arrived - stamp)
                late = self._by_clock and read_s - stamp - shift > _LOST_S
                if late or stamp + shift < time_s - _RESTART_S:
                    shift = read_s - stamp
                time_s = max(time_s, stamp + shift)
            # Frames that waited while the camera was opened are read faster than they were taken.
            opening &= read_s - before < max(_FAST_S, (stamp - last) / 2) and now - first_s < _OPENING_S
            last = stamp
            if opening:
                continue
            yield round(time_s, 6)

    def picture(self) -> cv2.typing.MatLike | None:
        """The current frame, BGR; None if it cannot be decoded."""
        decoded, picture = self._capture.retrieve()
        return picture if decoded else None


def _opened(address: str | int, reader: int, *options: int) -> cv2.VideoCapture:
    """Raises BadImage if OpenCV cannot open it."""
    try:
        if isinstance(address, str):
            address.encode()  # OpenCV aborts on others
        capture = cv2.VideoCapture(address, reader, options)
    except UnicodeEncodeError as error:
        raise BadImage("its name is not UTF-8; rename it") from error
    except cv2.error as error:  # a number that is no C int
        raise BadImage("OpenCV does not accept the address") from error
    if not capture.isOpened():
        capture.release()
        raise BadImage("it is not a video that this machine can decode")
    return capture


def frame_times(path: str) -> list[float]:
    """When each frame of a file is shown, in seconds after the first; only the container is read, no frame decoded.

    Raises:
        BadImage: OpenCV cannot open it, or it has no frames.
    """
    capture = _opened(path, cv2.CAP_FFMPEG, cv2.CAP_PROP_FORMAT, -1)  # packets in the order of decoding
    stamps = []
    while capture.grab():
        stamps.append(capture.get(cv2.CAP_PROP_POS_MSEC) / 1e3)
    capture.release()
    if not stamps:
        raise BadImage("it has no frames")
    return [round(stamp - min(stamps), 6) for stamp in sorted(stamps)]


def frames_at(path: str, times: Sequence[float]) -> Iterator[tuple[float, cv2.typing.MatLike]]:
    """The frames of a file at these times of `frame_times`, in order, each with its time, BGR. A time that is repeated
    repeats the frame; in the place of one that cannot be decoded is the next one, and none after the last.

    Raises:
        BadImage: OpenCV cannot open it.
    """
    left = deque(times)
    with Video(path) as video:
        for time_s in video:
            if left and time_s >= left[0] - _SAME_S and (picture := video.picture()) is not None:
                while left and time_s >= left[0] - _SAME_S:
                    left.popleft()
                    yield time_s, picture
            if not left:
                return


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
