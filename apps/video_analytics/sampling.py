"""Which frames of a video make a clip, and the clip that they make."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import msgspec

CHUNK_S = 1.0
SHOWN_FPS = 10.0
"""Pictures a second that are kept for the annotated video, at most."""


class Chunk(msgspec.Struct, frozen=True):
    """A clip of a video.

    start_s: from the source's beginning. frames: JPEG, as many as the head reads. shown: JPEG, smaller and at most
    `SHOWN_FPS` a second, for the annotated video. width: of `frames`, in pixels. seconds: from its start to the next
    one's.
    """

    index: int
    start_s: float
    frames: tuple[bytes, ...]
    shown: tuple[bytes, ...] = ()
    width: int = 0
    seconds: float = CHUNK_S


class ClipShape(NamedTuple):
    """What a head reads at once: so many frames, `fps` of them a second; None spreads them over each second."""

    num_frames: int
    fps: float | None = None

    @property
    def seconds(self) -> float:
        """From one clip's start to the next one's."""
        return CHUNK_S if self.fps is None else self.num_frames / self.fps


class Frame:
    """A decoded frame, encoded once however many heads read it. width: in pixels."""

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
    """Collects the frames of one clip after the other.

    Args:
        shape: of the clips.
        rate: of the video, frames a second; at least the shape's own.
        shown: keep pictures for the annotated video, evenly over each clip's time.
    """

    def __init__(self, shape: ClipShape, rate: float, shown: bool) -> None:
        self._shape = shape
        self._rate = rate
        self._keeps_shown = shown
        self._index = -1
        self._width = 0
        self._next_clip()

    def wants(self, index: int) -> bool:
        """Whether the video's frame of that number, from 0, has to be decoded."""
        return index in self._places or index in self._shown_places

    def add(self, index: int, frame: Frame | None) -> Chunk | None:
        """Take the next frame, which may be left out where it is not wanted or cannot be decoded. Returns the clip that
        ends with it."""
        if frame is not None and index in self._places:
            self._frames.append(frame.jpeg)
            self._width = frame.width
        if frame is not None and index in self._shown_places:
            self._shown.append(frame.small)
        return self.rest() if index + 1 == self._end else None

    def rest(self) -> Chunk | None:
        """The clip so far, frames of it repeated where it has too few; None where it has none. The next one begins."""
        frames, shown, index = self._frames, self._shown, self._index
        self._next_clip()
        if not frames:
            return None
        seconds = self._shape.seconds
        chosen = tuple(frames[place] for place in spread(self._shape.num_frames, len(frames)))
        return Chunk(index, index * seconds, chosen, tuple(shown), self._width, seconds)

    def _next_clip(self) -> None:
        self._index += 1
        self._frames: list[bytes] = []
        self._shown: list[bytes] = []
        num_frames, fps = self._shape
        if fps is None:
            length = max(num_frames, round(self._rate * CHUNK_S))
            first, self._end = self._index * length, (self._index + 1) * length
            self._places = {first + place for place in spread(num_frames, length)}
        else:
            first, self._end = self._place(0, fps), self._place(num_frames, fps)
            self._places = {self._place(number, fps) for number in range(num_frames)}
        length = self._end - first
        kept = min(length, max(1, round(SHOWN_FPS * self._shape.seconds)))
        self._shown_places = {first + place for place in spread(kept, length)} if self._keeps_shown else set()
        if not self._keeps_shown:
            self._end = max(self._places) + 1  # nothing of the clip is missing then

    def _place(self, number: int, fps: float) -> int:
        """Of this clip's frame of that number in the video."""
        return int((self._index * self._shape.num_frames + number) * self._rate / fps + 1e-6)


def spread(count: int, length: int) -> list[int]:
    """`count` places from the first to the last of `length`; a single one is the middle."""
    if count == 1:
        return [length // 2]
    return [round(i * (length - 1) / (count - 1)) for i in range(count)]
