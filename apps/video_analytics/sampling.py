"""Selects the frames of a video that form a clip, and builds the clip."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import msgspec

CHUNK_S = 1.0
"""Length of a clip without `fps`, to the nearest frame; longer if that has fewer frames than the head reads."""

SHOWN_FPS = 10.0
"""Maximum pictures per second kept for the annotated video."""


class Chunk(msgspec.Struct, frozen=True):
    """A clip of a video.

    start_s: from the beginning of the source. frames: JPEG, as many as the head reads. shown: JPEG, smaller and at most
    `SHOWN_FPS` per second, for the annotated video; or every frame of the video, for tracking. width: of `frames`, in
    pixels. seconds: from its start to that of the next clip. shown_s: from one picture of `shown` to the next. read_s:
    from its start to the end of the frame that completed it. problem: why it has no frames and is not answered.
    """

    index: int
    start_s: float
    frames: tuple[bytes, ...]
    shown: tuple[bytes, ...] = ()
    width: int = 0
    seconds: float = CHUNK_S
    shown_s: float = 1 / SHOWN_FPS
    read_s: float = 0.0
    problem: str | None = None


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
    """Collects the frames of one clip after another.

    Args:
        shape: of the clips.
        rate: of the video, frames per second; at least that of the shape.
        shown: keep pictures for the annotated video, evenly over each clip's time.
    """

    def __init__(self, shape: ClipShape, rate: float, shown: bool) -> None:
        self._shape = shape
        self._rate = rate
        self._keeps_shown = shown or shape.every_frame
        num_frames, fps, _ = shape
        self._length = max(num_frames, round(rate * CHUNK_S))  # frames of a clip without fps
        self._seconds = self._length / rate if fps is None else num_frames / fps
        self._index = -1
        self._width = 0
        self._first = self._end = 0  # indices in the video: of its first frame, and after its last
        self._num_read = 0  # of the clip's frames, also those that are not wanted
        self._reserve: Frame | None = None  # the clip's first frame that was decoded
        self._next_clip()

    def wants(self, index: int) -> bool:
        """Whether the video's frame with this index, from 0, has to be decoded."""
        nothing_yet = index >= self._first and self._reserve is None
        return nothing_yet or index in self._places or index in self._shown_places

    def add(self, index: int, frame: Frame | None) -> Chunk | None:
        """Add the next frame, or None if it is not wanted or cannot be decoded. Returns the clip that it completes, if
        any.
        """
        self._num_read = index + 1 - self._first
        if frame is not None and index >= self._first:
            self._reserve = self._reserve or frame
        if frame is not None and index in self._places:
            self._frames.append(frame.jpeg)
            self._width = frame.width
        if frame is not None and index in self._shown_places:
            self._shown.append(frame.small)
        return self.rest() if index + 1 == self._end else None

    def rest(self) -> Chunk | None:
        """The unfinished clip, with frames repeated if it has too few, or with its first frame if it has none of its
        own; None if no frame was decoded. Starts the next clip.
        """
        frames, shown, index, width = self._frames, self._shown, self._index, self._width
        if not frames and self._reserve is not None:
            frames, width = [self._reserve.jpeg], self._reserve.width
        shown_s = 1 / self._rate if self._shape.every_frame else self._seconds / max(1, len(self._shown_places))
        read_s = max(0, self._num_read) / self._rate
        self._next_clip()
        if not frames:
            return None
        chosen = tuple(frames[place] for place in spread(self._shape.num_frames, len(frames)))
        return Chunk(index, index * self._seconds, chosen, tuple(shown), width, self._seconds, shown_s, read_s)

    def _next_clip(self) -> None:
        self._index += 1
        self._num_read = 0
        self._frames: list[bytes] = []
        self._shown: list[bytes] = []
        self._reserve = None
        num_frames, fps, every_frame = self._shape
        if fps is None:
            self._first, self._end = self._index * self._length, (self._index + 1) * self._length
            self._places = {self._first + place for place in spread(num_frames, self._length)}
        else:
            self._first, self._end = self._place(0, fps), self._place(num_frames, fps)
            self._places = {self._place(number, fps) for number in range(num_frames)}
        length = self._end - self._first
        kept = length if every_frame else min(length, max(1, round(SHOWN_FPS * self._seconds)))
        self._shown_places = {self._first + place for place in spread(kept, length)} if self._keeps_shown else set()
        if not self._keeps_shown:
            self._end = max(self._places) + 1  # the clip is complete then

    def _place(self, number: int, fps: float) -> int:
        """Index in the video of this clip's frame with this number."""
        return int((self._index * self._shape.num_frames + number) * self._rate / fps + 1e-6)


def spread(count: int, length: int) -> list[int]:
    """`count` indices from the first to the last of `length`; a single one is the middle."""
    if count == 1:
        return [length // 2]
    return [round(i * (length - 1) / (count - 1)) for i in range(count)]
