"""Selects the frames of a video that form a clip, and builds the clip."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import msgspec

CHUNK_S = 1.0
SHOWN_FPS = 10.0
"""Maximum pictures per second kept for the annotated video."""


class Chunk(msgspec.Struct, frozen=True):
    """A clip of a video.

    start_s: from the beginning of the source. frames: JPEG, as many as the head reads. shown: JPEG, smaller and at most
    `SHOWN_FPS` per second, for the annotated video; or every frame of the video, for tracking. width: of `frames`, in
    pixels. seconds: from its start to that of the next clip. shown_s: from one picture of `shown` to the next.
    """

    index: int
    start_s: float
    frames: tuple[bytes, ...]
    shown: tuple[bytes, ...] = ()
    width: int = 0
    seconds: float = CHUNK_S
    shown_s: float = 1 / SHOWN_FPS


class ClipShape(NamedTuple):
    """The clip that a head reads: number of frames, `fps` of them per second; None spreads them over each second.

    every_frame: keep every frame of the video as a smaller picture, for tracking; `fps` is then set.
    """

    num_frames: int
    fps: float | None = None
    every_frame: bool = False

    @property
    def seconds(self) -> float:
        """From the start of one clip to the start of the next."""
        return CHUNK_S if self.fps is None else self.num_frames / self.fps


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
        self._index = -1
        self._width = 0
        self._next_clip()

    def wants(self, index: int) -> bool:
        """Whether the video's frame with this index, from 0, has to be decoded."""
        return index in self._places or index in self._shown_places

    def add(self, index: int, frame: Frame | None) -> Chunk | None:
        """Add the next frame, or None if it is not wanted or cannot be decoded. Returns the clip that it completes, if
        any.
        """
        if frame is not None and index in self._places:
            self._frames.append(frame.jpeg)
            self._width = frame.width
        if frame is not None and index in self._shown_places:
            self._shown.append(frame.small)
        return self.rest() if index + 1 == self._end else None

    def rest(self) -> Chunk | None:
        """The unfinished clip, with frames repeated if it has too few; None if it has none. Starts the next clip."""
        frames, shown, index = self._frames, self._shown, self._index
        self._next_clip()
        if not frames:
            return None
        seconds = self._shape.seconds
        chosen = tuple(frames[place] for place in spread(self._shape.num_frames, len(frames)))
        shown_s = 1 / self._rate if self._shape.every_frame else seconds / max(1, len(shown))
        return Chunk(index, index * seconds, chosen, tuple(shown), self._width, seconds, shown_s)

    def _next_clip(self) -> None:
        self._index += 1
        self._frames: list[bytes] = []
        self._shown: list[bytes] = []
        num_frames, fps, every_frame = self._shape
        if fps is None:
            length = max(num_frames, round(self._rate * CHUNK_S))
            first, self._end = self._index * length, (self._index + 1) * length
            self._places = {first + place for place in spread(num_frames, length)}
        else:
            first, self._end = self._place(0, fps), self._place(num_frames, fps)
            self._places = {self._place(number, fps) for number in range(num_frames)}
        length = self._end - first
        kept = length if every_frame else min(length, max(1, round(SHOWN_FPS * self._shape.seconds)))
        self._shown_places = {first + place for place in spread(kept, length)} if self._keeps_shown else set()
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
