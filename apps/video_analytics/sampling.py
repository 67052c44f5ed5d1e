"""Selects the frames of a video that form a clip, by their times, and builds the clip."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

CHUNK_S = 1.0
"""Length of a clip without `fps`, to the nearest frame; longer if that has fewer frames than the head reads."""

SHOWN_FPS = 10.0
"""Maximum pictures per second kept for the annotated video."""

_REACH = 0.85  # of the time to the next frame, in which a frame is the one to take; the rest are rounded time stamps
_GAP = 3  # frames that are missing before a clip ends


class Chunk(msgspec.Struct, frozen=True):
    """A clip of a video.

    start_s: from the beginning of the source. frames: JPEG, as many as the head reads. shown: JPEG, smaller and at most
    `SHOWN_FPS` per second, for the annotated video; or every frame of the video, for tracking. width: of `frames`, in
    pixels. seconds: its length. shown_s: the time of each picture of `shown`, from `start_s`. problem: why it has no
    frames and is not answered. began: of a camera, the Unix time at which its times begin.
    """

    index: int
    start_s: float
    frames: tuple[bytes, ...]
    shown: tuple[bytes, ...] = ()
    width: int = 0
    seconds: float = CHUNK_S
    shown_s: tuple[float, ...] = ()
    problem: str | None = None
    began: float | None = None

    def utc(self, time_s: float) -> datetime.datetime:
        """When a camera took the frame with this time; now for a file, which has no such time, or is read faster."""
        at = time.time() if self.began is None else min(time.time(), self.began + time_s)
        return datetime.datetime.fromtimestamp(at, datetime.UTC)


class ClipShape(NamedTuple):
    """The clip that a head reads: number of frames, `fps` of them per second; None spreads them over `CHUNK_S`.

    every_frame: keep every frame of the video as a smaller picture, for tracking; `fps` is then set.
    """

    num_frames: int
    fps: float | None = None
    every_frame: bool = False


class Frame:
    """A decoded frame, encoded once for all heads. width: in pixels."""

    def __init__(self, jpeg: Callable[[], bytes], small: Callable[[], bytes], width: int) -> None:
        self._jpeg = jpeg
        self._small = small
        self.width = width

    @functools.cached_property
    def jpeg(self) -> bytes:
        return self._jpeg()

    @functools.cached_property
    def small(self) -> bytes:
        return self._small()


class Sampler:
    """Collects the frames of one clip after another. For each frame of the video, call `advance`, then `add`.

    With `fps`, a frame is taken for each multiple of 1 / `fps`: the last one up to that time, if frames follow at the
    distance of the latest ones. A frame is taken once; a clip of a slower video has fewer, which are repeated. The
    seconds of a gap have no clip, and the next one begins with the first frame after it.

    Args:
        shape: of the clips.
        step_s: time between frames, until two are known.
        shown: keep pictures for the annotated video.
    """

    def __init__(self, shape: ClipShape, step_s: float, shown: bool) -> None:
        self._shape = shape
        self._steps = step_s, step_s  # before the latest two frames
        self._keeps_shown = shown or shape.every_frame
        self._seconds = CHUNK_S if shape.fps is None else shape.num_frames / shape.fps
        self._index = 0
        self._time_s = 0.0
        self._start_s: float | None = None  # of the clip
        self._even_s = 0.0  # where clips of exactly `CHUNK_S` would start
        self._next_shown_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._num_due = 0  # frames of the clip that are due
        self._complete = False  # returned before the next one starts
        self._taken = self._is_shown = False  # the current frame
        self._width = 0
        self._frames: list[bytes] = []
        self._shown: list[tuple[bytes, float]] = []
        self._reserve: Frame | None = None  # the clip's first frame that was decoded

    def advance(self, time_s: float) -> Chunk | None:
        """Go on to the frame of this time. Returns the clip that has ended before it, if any."""
        ended = None
        if self._start_s is None:
            self._start_s = self._even_s = self._time_s = self._next_shown_s = time_s
        else:
            passed = time_s - self._time_s
            gap = passed > max(CHUNK_S, _GAP * min(self._steps))
            self._steps = self._steps[1], passed
            if (start_s := self._start_at(time_s, gap)) > self._start_s:
                ended = self.rest()
                self._start_s = start_s
                self._even_s += CHUNK_S
                if abs(start_s - self._even_s) > min(self._steps):  # after a gap or a longer clip
                    self._even_s = start_s
                self._clear()
        self._time_s = time_s
        reach_s = time_s + _REACH * min(self._steps)
        before = self._num_due
        while self._num_due < self._shape.num_frames and self._due_s() < reach_s:
            self._num_due += 1
            if self._shape.fps is None:
                break  # of a slow video, a clip has every frame
        self._taken = self._num_due > before
        self._is_shown = self._keeps_shown and (self._shape.every_frame or reach_s > self._next_shown_s)
        if self._is_shown:
            self._next_shown_s = max(self._next_shown_s + 1 / SHOWN_FPS, time_s + 0.5 / SHOWN_FPS)
        return ended

    @property
    def wants(self) -> bool:
        """Whether the frame has to be decoded."""
        return not self._complete and (self._taken or self._is_shown or self._reserve is None)

    def add(self, frame: Frame | None) -> Chunk | None:
        """Add the frame, or None if it is not wanted or cannot be decoded. Returns the clip that it completes, if any;
        one with pictures for the annotated video ends with the next clip's first frame.
        """
        if self._complete:
            return None
        if frame is not None:
            self._reserve = self._reserve or frame
            if self._taken:
                self._frames.append(frame.jpeg)
                self._width = frame.width
            if self._is_shown:
                assert self._start_s is not None
                self._shown.append((frame.small, self._time_s - self._start_s))
        chunk = None
        if not self._keeps_shown and self._num_due >= self._shape.num_frames:
            chunk, self._complete = self.rest(), True
        return chunk

    def rest(self) -> Chunk | None:
        """The unfinished clip, with frames repeated if it has too few, or with its first frame if it has none of its
        own; None if no frame was decoded.
        """
        frames, width = self._frames, self._width
        if not frames and self._reserve is not None:
            frames, width = [self._reserve.jpeg], self._reserve.width
        if self._complete or not frames or self._start_s is None:
            return None
        step, seconds = min(self._steps), self._seconds
        if self._shape.fps is None and (length_s := self._time_s + step - self._start_s) > CHUNK_S + step:
            seconds = length_s
        chosen = tuple(frames[place] for place in spread(self._shape.num_frames, len(frames)))
        pictures, times = tuple(picture for picture, _ in self._shown), tuple(time for _, time in self._shown)
        self._index += 1
        return Chunk(self._index - 1, self._start_s, chosen, pictures, width, seconds, times)

    def _start_at(self, time_s: float, gap: bool) -> float:
        """When the clip of the frame of this time starts."""
        assert self._start_s is not None
        step = min(self._steps)
        if gap:
            return time_s
        if self._shape.fps is not None:
            return self._start_s + self._seconds * int((time_s + _REACH * step - self._start_s) / self._seconds)
        ends = self._num_due >= self._shape.num_frames and time_s > self._even_s + CHUNK_S - step / 2
        return time_s if ends else self._start_s

    def _due_s(self) -> float:
        """The time of the clip's next frame."""
        assert self._start_s is not None
        num_frames, fps, _ = self._shape
        if fps is not None:
            return self._start_s + self._num_due / fps
        length_s = self._even_s + CHUNK_S - self._start_s
        between = max(0.0, length_s - min(self._steps)) / max(1, num_frames - 1)
        return self._start_s + (length_s / 2 if num_frames == 1 else self._num_due * between)


def spread(count: int, length: int) -> list[int]:
    """`count` indices from the first to the last of `length`; a single one is the middle."""
    if count == 1:
        return [length // 2]
    return [round(i * (length - 1) / (count - 1)) for i in range(count)]
