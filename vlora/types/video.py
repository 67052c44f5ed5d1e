"""Videos as callers send them: frames with their times; the suffixes of files with pictures and videos."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Generic, NamedTuple, TypeVar

import msgspec

from vlora.errors import BadRequest
from vlora.types.request import MAX_VISUALS

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
VIDEO_SUFFIXES = (
    *(".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts", ".wmv", ".flv", ".3gp"),
)
Frame = TypeVar("Frame", covariant=True)


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
