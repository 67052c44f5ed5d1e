"""Videos as callers send them: frames with their times, or a file; the suffixes of files with pictures and videos."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Annotated, Generic, NamedTuple, TypeVar

import msgspec

from vlora.errors import BadRequest
from vlora.types.output import ErrorValue
from vlora.types.request import MAX_VISUALS

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
VIDEO_SUFFIXES = (
    *(".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts", ".wmv", ".flv", ".3gp"),
)
Frame = TypeVar("Frame", covariant=True)
Content = TypeVar("Content", covariant=True)

_MAX_FPS = 1000
_DEFAULT_FRAMES = 16
_NEAR_S = 1e-3  # time stamps of some containers are rounded to milliseconds


class Video(NamedTuple, Generic[Frame]):
    """frames: images of one size. times: of each frame, in seconds, not decreasing."""

    frames: Annotated[Sequence[Frame], msgspec.Meta(max_length=MAX_VISUALS)]
    times: Annotated[Sequence[float], msgspec.Meta(max_length=MAX_VISUALS)]

    def check(self) -> None:
        """Raises BadRequest for a video without frames, or with times that do not fit them."""
        if not self.frames:
            raise BadRequest("a video has no frames; send at least one")
        if len(self.times) != len(self.frames):
            raise BadRequest(f"a video has {len(self.frames)} frames and {len(self.times)} times; send one per frame")
        before = 0.0
        for place, time in enumerate(self.times):
            if not (math.isfinite(time) and time >= before):
                raise BadRequest(
                    f"time {place} of a video is {time}; times are finite seconds, 0 or more, and do not decrease"
                )
            before = time


class VideoFile(msgspec.Struct, Generic[Content], frozen=True):
    """An encoded video, of which the server decodes frames by the times at which they are shown.

    fps: frames per second. num_frames: as many, at equal distances from the first to the last. Without both, one per
    second, at most 16 at equal distances.

    Raises:
        BadRequest: A value is out of range, or there are both.
    """

    content: Content
    fps: float | None = None
    num_frames: int | None = None

    def __post_init__(self) -> None:
        if self.fps is not None and self.num_frames is not None:
            raise BadRequest("a video has fps and num_frames; send one of the two", field="fps")
        if self.fps is not None and not 0 < self.fps <= _MAX_FPS:
            raise BadRequest(f"fps of a video is {self.fps}; it must be above 0, and at most {_MAX_FPS}", field="fps")
        if self.num_frames is not None and not 1 <= self.num_frames <= MAX_VISUALS:
            message = f"num_frames of a video is {self.num_frames}; it must be from 1 to {MAX_VISUALS}"
            raise BadRequest(message, field="num_frames")

    def choose(self, times: Sequence[float]) -> list[float]:
        """Of the times of all frames, those of the frames to decode: for each moment, the frame that is shown then."""
        last = times[-1]
        if self.fps is not None:
            spans = itertools.pairwise((*times, last + 2 * _NEAR_S))
            return [at for at, end in spans if math.ceil((at - _NEAR_S) * self.fps) < (end - _NEAR_S) * self.fps]
        count = self.num_frames or min(_DEFAULT_FRAMES, math.ceil(last) or 1)
        moments = [last / 2] if count == 1 else [last * place / (count - 1) for place in range(count)]
        return sorted(set(shown_at(times, moments)))


def shown_at(times: Sequence[float], moments: Iterable[float]) -> list[float]:
    """For each moment, the time of the frame that is shown then. times: of all frames, from 0."""
    return [times[max(0, bisect_right(times, moment + _NEAR_S) - 1)] for moment in moments]


class DecodeVideo(msgspec.Struct, frozen=True, kw_only=True):
    """What a process decodes, within limits. max_pixels: of all frames together."""

    video: VideoFile[None]
    max_frames: int
    max_s: float
    max_pixels: int


class FrameReport(msgspec.Struct, frozen=True):
    """Of a process that decodes a video: a frame, whose pixels follow (RGB); an error; or neither, which is the end."""

    time_s: float = 0.0
    height: int = 0
    width: int = 0
    error: ErrorValue | None = None
