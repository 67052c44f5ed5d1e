"""Draws a chunk's answer on its pictures, into a video for browsers."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from apps.video_analytics.answers import ChunkResult
from apps.video_analytics.sampling import SHOWN_FPS, Chunk
from vlora.errors import BadImage
from vlora.opencv import cv2, quiet
from vlora.run_folder import NotWritten

if TYPE_CHECKING:
    from apps.video_analytics.tracking import TrackedFrame

_WIDTH = 480  # small videos are enlarged, so that text is readable
_BAR = 48  # pixels below the picture
_SUFFIX, _CODEC = ".webm", "VP80"  # OpenCV's own build writes this format and every browser plays it

LONGEST_S = 60.0  # for which a picture is repeated, of a camera that was lost

_COLOUR = (80, 220, 255)


class AnnotatedVideo:
    """A WebM file that grows with every chunk. If the process is killed, the file is playable except for its last
    seconds, which are not yet on the disk.

    It has a constant rate: a picture is repeated until the time of the next one, of a camera that was lost for up to
    `LONGEST_S`, and left out if another one has its time.
    """

    def __init__(self, path: Path) -> None:
        """path: its suffix becomes .webm."""
        self.path = path.with_suffix(_SUFFIX)
        self._writer: cv2.VideoWriter | None = None
        self._size = (0, 0)
        self._rate = SHOWN_FPS
        self._began_s = self._end_s = 0.0
        self._num_written = 0
        self._last: cv2.typing.MatLike | None = None

    def add(self, chunk: Chunk, result: ChunkResult, frames: Sequence[TrackedFrame] = ()) -> None:
        """Draw a chunk's answer on its pictures.

        Args:
            frames: the tracked objects in each picture, which are drawn instead of the answer's boxes.

        Raises:
            BadImage: the file cannot be written.
        """
        for place, encoded in enumerate(chunk.shown):
            picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
            assert picture is not None, "pictures of a chunk are JPEGs made here"
            boxes = _tracked_boxes(frames[place]) if frames else _boxes(result)
            drawn = _draw_result(picture, chunk, result, boxes)
            time_s = chunk.start_s + chunk.shown_s[place]
            if self._writer is None:
                self._open(drawn, time_s, len(chunk.shown) / chunk.seconds)
            self._write_until(time_s)
            self._last = drawn if drawn.shape[1::-1] == self._size else cv2.resize(drawn, self._size)
        if not shutil.disk_usage(self.path.parent).free:  # the writer drops what a full disk does not take
            raise NotWritten(f"cannot write {str(self.path)!r}: {os.strerror(errno.ENOSPC)}")
        if chunk.shown:
            self._end_s = time_s + chunk.seconds / len(chunk.shown)

    def close(self) -> None:
        if self._writer is not None:
            self._write_until(self._end_s)
            self._writer.release()

    def _write_until(self, time_s: float) -> None:
        """Write the last picture up to this time."""
        self._began_s = max(self._began_s, time_s - self._num_written / self._rate - LONGEST_S)
        wanted = round((time_s - self._began_s) * self._rate)
        if self._writer is not None and self._last is not None:
            for _ in range(self._num_written, wanted):
                self._writer.write(self._last)
            self._num_written = max(self._num_written, wanted)

    def _open(self, first: cv2.typing.MatLike, time_s: float, rate: float) -> None:
        self._size = (first.shape[1], first.shape[0])
        self._began_s = self._end_s = time_s
        self._rate = max(SHOWN_FPS, float(round(rate)))  # more with every frame, for tracks
        with quiet():
            self._writer = cv2.VideoWriter(str(self.path), cv2.VideoWriter.fourcc(*_CODEC), self._rate, self._size)
        if not self._writer.isOpened():
            raise BadImage(f"cannot write video {str(self.path)!r}")


_Named = tuple[tuple[float, float, float, float], str]
"""A box (left, top, right, bottom) in pixels of the frames that the head reads, and its text."""


def _boxes(result: ChunkResult) -> list[_Named]:
    """The answer's boxes in the last frame of the query."""
    boxes = () if result.answer is None else result.answer.boxes
    last = max((box.image for box in boxes), default=0)
    return [
        ((box.left, box.top, box.right, box.bottom), f"{box.label} {box.score:.0%}")
        for box in boxes
        if box.image == last
    ]


def _tracked_boxes(frame: TrackedFrame) -> list[_Named]:
    return [((box.left, box.top, box.right, box.bottom), f"{box.label} {box.id}") for box in frame.boxes]


def _draw_result(
    picture: cv2.typing.MatLike, chunk: Chunk, result: ChunkResult, boxes: Iterable[_Named]
) -> cv2.typing.MatLike:
    scale = max(1, round(_WIDTH / picture.shape[1]))
    picture = cv2.resize(picture, None, fx=scale, fy=scale, interpolation=cv2.INTER_NEAREST)
    if chunk.width:
        _draw_boxes(picture, boxes, picture.shape[1] / chunk.width)
    even = picture.shape[1] % 2, (picture.shape[0] + _BAR) % 2  # the codec accepts even sizes only
    drawn = cv2.copyMakeBorder(picture, 0, _BAR + even[1], 0, even[0], cv2.BORDER_CONSTANT, value=(0, 0, 0))
    if result.problem is not None:
        text = result.problem
    else:
        confidence = "" if result.answer is None else f"  {result.confidence:.0%}"
        text = f"{result.label}{confidence}  {result.latency_s * 1e3:.0f} ms"
    cv2.putText(drawn, text, (10, drawn.shape[0] - 16), cv2.FONT_HERSHEY_SIMPLEX, 0.7, (255, 255, 255), 1, cv2.LINE_AA)
    return drawn


def _draw_boxes(picture: cv2.typing.MatLike, boxes: Iterable[_Named], scale: float) -> None:
    for edges, text in boxes:
        left, top, right, bottom = (round(edge * scale) for edge in edges)
        cv2.rectangle(picture, (left, top), (right, bottom), _COLOUR, 2)
        cv2.putText(picture, text, (left, max(14, top - 5)), cv2.FONT_HERSHEY_SIMPLEX, 0.5, _COLOUR, 1, cv2.LINE_AA)
