"""Pictures and clips in files, decoded on each access, so that a data set may be larger than memory."""

from __future__ import annotations

import bisect
import codecs
import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np

from vlora.errors import BadImage
from vlora.models.vision.images import FORMATS, open_image, upright_rgb
from vlora.opencv import Video, cv2

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
VIDEO_SUFFIXES = (".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v", ".mpg", ".mpeg", ".ts")
QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that exchange width and height

_ORIENTATION = 0x0112
_ROUNDED_S = 1e-3  # error of time stamps in containers


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
            with open_image(self.file) as image:
                yield np.asarray(upright_rgb(image))
        except Exception as error:  # Pillow's readers raise many exception types on broken input
            raise ValueError(f"{self.file} is not a valid picture ({', '.join(FORMATS)}): {error}") from error

    def stored(self) -> tuple[tuple[int, int], int]:
        """Width and height before rotation, and the EXIF orientation, 1 to 8. Raises ValueError as decoding does."""
        try:
            with open_image(self.file) as image:
                size, orientation = image.size, image.getexif().get(_ORIENTATION, 1)
                # Pillow gives TIFF's size after rotation.
                turned = image.format == "TIFF" and orientation in QUARTER_TURNS
        except Exception as error:  # see above
            raise ValueError(f"{self.file} is not a valid picture ({', '.join(FORMATS)}): {error}") from error
        return (size[1], size[0]) if turned else size, orientation if orientation in range(1, 9) else 1


def find_file(folder: Path, name: str, what: str) -> Path | str:
    """The file of this name, with slashes of any system, or why there is none. what: "picture" or "video"."""
    file = folder / name
    if os.path.isfile(file):  # also false for a name that is too long
        return file
    if "\\" in name and os.path.isfile(other := folder / name.replace("\\", "/")):
        return other
    with contextlib.suppress(OSError):
        if similar := [each for each in file.parent.iterdir() if each.name.lower() == file.name.lower()]:
            return f"there is no {what} {file}; its name in the folder is {similar[0].name}"
    return f"there is no {what} {file}"


def read_text(file: Path) -> str:
    """The text of a file in UTF-8, or in UTF-16 or UTF-32 with a byte order mark. Raises OSError or a UnicodeError."""
    data = file.read_bytes()
    marks = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}  # begins as UTF-16's
    marks |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
    return data.decode(next((encoding for mark, encoding in marks.items() if data.startswith(mark)), "utf-8-sig"))


@dataclasses.dataclass(frozen=True)
class Clip(Frames):
    """Frames from `start_s` to `end_s` of a video (None: its end), evenly in time; a short video repeats frames."""

    file: Path
    num_frames: int
    start_s: float = 0.0
    end_s: float | None = None

    def __len__(self) -> int:
        return self.num_frames

    def __iter__(self) -> Iterator[np.ndarray]:
        wanted = list(self._places)
        with self._open() as video:
            # Read in order: seeking is inexact in most containers.
            for place, _ in enumerate(video):
                if wanted[0] == place:
                    picture = video.picture()
                    if picture is None:
                        raise ValueError(f"{self.file}: frame {place} is broken")
                    while wanted and wanted[0] == place:
                        yield cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)
                        del wanted[0]
                    if not wanted:
                        return
        raise ValueError(f"{self.file}: frame {wanted[0]} can no longer be read; the file may have changed")

    def _open(self) -> Video:
        try:
            return Video(str(self.file))
        except BadImage as error:
            raise ValueError(f"{self.file}: {error}") from error

    @functools.cached_property
    def _places(self) -> list[int]:
        """The places of the frames. All frames are read for their times: headers can be wrong."""
        with self._open() as video:
            times = list(video)
        if not times:
            raise ValueError(f"{self.file} contains no frame that can be decoded")
        first = bisect.bisect_left(times, self.start_s - _ROUNDED_S)
        last = len(times) if self.end_s is None else bisect.bisect_left(times, self.end_s - _ROUNDED_S)
        if first >= last:
            end = "its end" if self.end_s is None else f"{self.end_s:g}"
            why = f"its duration is {_duration_s(times):.2f} s"
            if 0 < first < len(times):
                why = f"its frames next to these are at {times[first - 1]:.2f} and {times[first]:.2f} s"
            raise ValueError(f"{self.file} has no frame from second {self.start_s:g} to {end}; {why}")
        own = times[first:last]
        if self.num_frames == 1:
            return [first + bisect.bisect_right(own, (own[0] + own[0] + _duration_s(own)) / 2 + _ROUNDED_S) - 1]
        step = (own[-1] - own[0]) / (self.num_frames - 1)
        return [first + _nearest(own, own[0] + number * step) for number in range(self.num_frames)]


def _duration_s(times: Sequence[float]) -> float:
    """From the first frame to the end of the last one, which is shown as long as frames are on average."""
    return (times[-1] - times[0]) * len(times) / max(1, len(times) - 1)


def _nearest(times: Sequence[float], time_s: float) -> int:
    after = bisect.bisect_left(times, time_s)
    return min((max(0, after - 1), min(after, len(times) - 1)), key=lambda place: abs(times[place] - time_s))
