"""Draws a chunk's answer on its pictures, into a video for browsers, and writes clips of events."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from apps.video_analytics.answers import ChunkResult
from apps.video_analytics.sampling import SHOWN_FPS, Chunk
from vlora.errors import BadImage, VLoraError
from vlora.opencv import cv2, quiet
from vlora.run_folder import UNFINISHED, NotWritten, whole, writing

if TYPE_CHECKING:
    from apps.video_analytics.plan.schema import ClipPlan
    from apps.video_analytics.tracking import TrackedFrame

_WIDTH = 480  # small videos are enlarged, so that text is readable
_BAR = 48  # pixels below the picture
_SUFFIX, _CODEC = ".webm", "VP80"  # OpenCV's own build writes this format and every browser plays it

LONGEST_S = 60.0  # for which a picture is repeated, of a camera that was lost

_COLOUR = (80, 220, 255)
_MOST_CLIPS = 8  # of a camera that wait for their last picture


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
            boxes = _tracked_boxes(frames[place]) if frames else _boxes(result)
            drawn = _draw_result(_decoded(encoded), chunk, result, boxes)
            self.add_picture(drawn, chunk.start_s + chunk.shown_s[place], len(chunk.shown) / chunk.seconds)

    def add_picture(self, picture: cv2.typing.MatLike, time_s: float, rate: float) -> None:
        """rate: pictures per second. Raises BadImage or NotWritten if the file cannot be written."""
        if self._writer is None:
            self._open(picture, time_s, rate)
        self._write_until(time_s)
        self._last = picture if picture.shape[1::-1] == self._size else cv2.resize(picture, self._size)
        self._end_s = time_s + 1 / rate
        if not shutil.disk_usage(self.path.parent).free:  # the writer drops what a full disk does not take
            raise NotWritten(f"cannot write {str(self.path)!r}: {os.strerror(errno.ENOSPC)}")

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


class EventClips:
    """Keeps the last pictures of a camera, and writes clips of its events. Used from several threads."""

    def __init__(self, plan: ClipPlan, folder: Path, say: Callable[[str], None]) -> None:
        """folder: of the events; its oldest files are deleted. say: called with why a clip is not written."""
        self._plan, self._folder, self._say = plan, folder, say
        self._pictures: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._open: dict[str, tuple[float, float]] = {}  # first and last time of clips by name
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="clips")

    def add(self, chunk: Chunk) -> None:
        """Keep the pictures of a chunk; those of times that others had are left out."""
        with self._lock:
            for since_s, encoded in zip(chunk.shown_s, chunk.shown, strict=True):
                time_s = chunk.start_s + since_s
                if self._pictures and time_s <= self._pictures[-1][0]:
                    continue
                self._finish([name for name, (_, last_s) in self._open.items() if last_s < time_s])
                self._pictures.append((time_s, encoded))
                self._size += len(encoded)
                while self._size > self._plan.buffer_mib * 2**20:
                    # A clip that does not fit ends early: its beginning and the event are in it.
                    first_s = self._pictures[0][0]
                    self._finish([name for name, times in self._open.items() if times[0] <= first_s])
                    self._size -= len(self._pictures.popleft()[1])

    def begin(self, name: str, time_s: float) -> bool:
        """Write a clip around a time, when its last picture has come. Returns whether there will be one."""
        with self._lock:
            if not self._pictures or self._pictures[0][0] > time_s or len(self._open) >= _MOST_CLIPS:
                return False
            self._open[name] = time_s - self._plan.before_s, time_s + self._plan.after_s
            return True

    def close(self) -> None:
        """Write the clips that are not complete."""
        with self._lock:
            self._finish([*self._open])
        self._threads.shutdown()

    def _finish(self, names: Sequence[str]) -> None:
        for name in names:
            first_s, last_s = self._open.pop(name)
            pictures = [each for each in self._pictures if first_s <= each[0] <= last_s]
            self._threads.submit(self._write, self._folder / name, pictures)

    def _write(self, path: Path, pictures: Sequence[tuple[float, bytes]]) -> None:
        try:
            with writing(path), whole(path, durable=False) as part:
                video = AnnotatedVideo(part)
                for time_s, encoded in pictures:
                    picture = _decoded(encoded)
                    height, width = (side // 2 * 2 for side in picture.shape[:2])  # as the codec requires
                    video.add_picture(picture[:height, :width], time_s, SHOWN_FPS)
                video.close()
            held = 0
            files = [each for each in self._folder.iterdir() if not each.name.startswith(UNFINISHED)]
            for each in sorted(files, key=lambda file: -file.stat().st_mtime):
                held += each.stat().st_size
                if held > self._plan.max_mib * 2**20 or time.time() - each.stat().st_mtime > self._plan.days * 86400:
                    each.unlink()
        except (VLoraError, OSError) as error:
            self._say(f"clip {path.name} is not written: {error}")


def snapshot(picture: bytes, chunk: Chunk, result: ChunkResult, frame: TrackedFrame | None) -> bytes:
    """A JPEG of the picture of an event with its boxes. frame: tracked objects, drawn instead of the answer's boxes."""
    boxes = _boxes(result) if frame is None else _tracked_boxes(frame)
    return cv2.imencode(".jpg", _draw_result(_decoded(picture), chunk, result, boxes))[1].tobytes()


def _decoded(encoded: bytes) -> cv2.typing.MatLike:
    picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    assert picture is not None, "pictures of a chunk are JPEGs made here"
    return picture


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
