"""Pictures and clips in files, decoded on each access, so that a data set may be larger than memory."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, overload

import cv2
import numpy as np
from PIL import Image

from vlora.models.vision.images import FORMATS, upright_rgb

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
VIDEO_SUFFIXES = (".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v", ".mpg", ".mpeg")


class FileInfo(NamedTuple):
    """digest: hash of the file's bytes. size: width and height in pixels."""

    digest: str
    size: tuple[int, int]


class Frames(Sequence[np.ndarray]):
    """RGB uint8 pictures [height, width, 3] of one sample. file: the file that contains them."""

    file: Path

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[np.ndarray]: ...

    def __getitem__(self, index: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        return list(self)[index]

    def __iter__(self) -> Iterator[np.ndarray]:
        raise NotImplementedError

    def verify(self) -> FileInfo:
        """Decode the whole file. Raises ValueError with the reason if it cannot be used."""
        try:
            with self.file.open("rb") as source:
                digest = hashlib.file_digest(source, "blake2b").hexdigest()
        except OSError as error:
            raise ValueError(f"{self.file} cannot be read: {error.strerror}") from error
        height, width = 0, 0
        for frame in self:
            height, width = frame.shape[:2]
        return FileInfo(digest, (width, height))


@dataclasses.dataclass(frozen=True)
class Picture(Frames):
    """One picture, decoded as in the server."""

    file: Path

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[np.ndarray]:
        try:
            with Image.open(self.file, formats=FORMATS) as image:
                yield np.asarray(upright_rgb(image))
        except Exception as error:  # Pillow's readers raise many exception types on broken input
            raise ValueError(f"{self.file} is not a valid picture ({', '.join(FORMATS)}): {error}") from error


@dataclasses.dataclass(frozen=True)
class Clip(Frames):
    """Evenly spaced frames from `start_s` to `end_s` of a video (None: its end); a short video repeats frames."""

    file: Path
    num_frames: int
    start_s: float = 0.0
    end_s: float | None = None

    def __len__(self) -> int:
        return self.num_frames

    def __iter__(self) -> Iterator[np.ndarray]:
        first, length = self._span
        wanted = [first + place for place in _spread(self.num_frames, length)]
        capture = cv2.VideoCapture(str(self.file))
        try:
            # Read in order: seeking is inexact in most containers.
            place = -1
            frame = None
            for target in wanted:
                while place < target:
                    place += 1
                    if not capture.grab():
                        raise ValueError(f"{self.file}: frame {place} can no longer be read; the file may have changed")
                    frame = None
                if frame is None:
                    decoded, frame = capture.retrieve()
                    if not decoded:
                        raise ValueError(f"{self.file}: frame {place} is broken")
                yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
        finally:
            capture.release()

    @functools.cached_property
    def _span(self) -> tuple[int, int]:
        """The first frame and the number of frames. Frames are counted, since headers can be wrong."""
        capture = cv2.VideoCapture(str(self.file))
        try:
            if not capture.isOpened():
                raise ValueError(f"{self.file} is not a video that this machine can decode")
            fps = capture.get(cv2.CAP_PROP_FPS)
            length = 0
            while capture.grab():
                length += 1
        finally:
            capture.release()
        if not length:
            raise ValueError(f"{self.file} contains no frame that can be decoded")
        if self.start_s == 0 and self.end_s is None:
            return 0, length
        if not 0 < fps < 1000:
            raise ValueError(f"{self.file} has no valid frame rate, so times in seconds cannot be located in it")
        first = round(self.start_s * fps)
        last = length if self.end_s is None else min(length, round(self.end_s * fps))
        if first >= last:
            raise ValueError(
                f"{self.file} has no frame from second {self.start_s:g} to "
                f"{'its end' if self.end_s is None else f'{self.end_s:g}'}; its duration is {length / fps:.2f} s"
            )
        return first, last - first


def _spread(count: int, length: int) -> list[int]:
    """`count` evenly spaced indices from the first to the last of `length`; the middle for a count of 1."""
    if count == 1:
        return [length // 2]
    return [round(i * (length - 1) / (count - 1)) for i in range(count)]
